"""Rollout -> branch views -> prefix trie -> packed rows. Numpy only."""

from mwjax.tree.build import Junction, SampledTokens, Tree, View, build
from mwjax.tree.history import TreeError
from mwjax.tree.methods import EXACT_METHODS, METHODS, Fragment, RowShape, RowTooShort, fragments
from mwjax.tree.pack import Fill, collate, fill, pack
from mwjax.tree.rows import Batch, Edges, Pairs, Rows
from mwjax.tree.trie import Trie, build_trie

__all__ = [
    "EXACT_METHODS",
    "METHODS",
    "Batch",
    "Edges",
    "Fill",
    "Fragment",
    "Junction",
    "Pairs",
    "RowShape",
    "RowTooShort",
    "Rows",
    "SampledTokens",
    "Tree",
    "TreeError",
    "Trie",
    "View",
    "build",
    "build_trie",
    "collate",
    "fill",
    "fragments",
    "pack",
]
