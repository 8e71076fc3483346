"""What a harness did at a junction."""

from __future__ import annotations

from mwjax.tree import Junction, Tree


def deed(tree: Tree, junction: Junction) -> str | None:
    """``restored`` where an edit put text back, else ``junction.detail``: ``fold``, ``pruned_tool_result``, ..."""
    restored = any(edit.restored and edit.before_turn == junction.turn for edit in tree.rollout.edits)
    return "restored" if restored else junction.detail


def junction_label(tree: Tree, junction: Junction) -> str:
    """``deletion``, ``replacement, fold``, ``insertion, restored``: the reason, and what was done where edits tell."""
    done = deed(tree, junction)
    return junction.reason if done is None else f"{junction.reason}, {done.replace('_', ' ')}"
