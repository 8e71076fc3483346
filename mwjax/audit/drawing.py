"""A rollout's tree drawn in a terminal: one bar per branch view, each starting under the place where it forks.

Plain text with styles, laid out for the console's width, so that it reads the same at 80 columns and in a pipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.text import Text

from mwjax.audit.inspect import trie_tokens
from mwjax.audit.junctions import deed
from mwjax.audit.tables import plural
from mwjax.audit.text import Decode, harmless, head
from mwjax.rollouts.record import MAIN_CHAIN
from mwjax.tree import Junction, Tree, View

# What a bar's cell shows, most telling first: character, its ASCII stand-in, style, meaning.
CELLS = (
    ("▓", "x", "red", "sampled here, diverges"),
    ("█", "#", "green", "sampled here"),
    ("▒", "=", "cyan", "sampled earlier"),
    ("░", ".", "bright_black", "context"),
)
DIVERGING, SAMPLED, CARRIED, CONTEXT = range(4)
COLUMNS = ("context", "sampled", "survive", "diverge")
LABEL, TURNS = 4, 8
# A cell shows the first kind that fills at least this share of it.
TELLING = 0.25


def legend(console: Console) -> Text:
    """What the characters of the bars mean."""
    line = Text()
    for kind, (_, _, style, meaning) in enumerate(CELLS):
        line.append(("  " if kind else "") + _character(console, kind), style).append(f" {meaning}", "dim")
    return line


def draw(tree: Tree, console: Console, decode: Decode | None = None) -> None:
    """Print one rollout. With ``decode``, also what was sampled, evicted and inserted, as text."""
    for line in _lines(tree, console, decode):
        line.plain = harmless(line.plain)
        # What is cut off ends in an ellipsis, which ASCII lacks.
        console.print(line, no_wrap=True, overflow="crop" if _ascii(console) else "ellipsis")


def _lines(tree: Tree, console: Console, decode: Decode | None) -> Iterator[Text]:
    rollout, sampled = tree.rollout, tree.sampled
    title = Text(rollout.id, "bold")
    if rollout.group is not None:
        title.append(f"  group {rollout.group}", "not bold")
    if rollout.reward is not None:
        title.append(f"  reward {rollout.reward:g}", "not bold")
    yield title
    tokens, trie = sum(len(view.ids) for view in tree.views), trie_tokens([tree])
    trainable = int(sampled.trainable.sum())
    untrained = "" if trainable == len(sampled.turn) else f" ({trainable:,} trainable)"
    yield Text(
        f"{plural(len(rollout.turns), 'turn')}, {plural(len(sampled.turn), 'sampled token')}"
        f"{untrained}, {plural(len(tree.views), 'view')}: "
        f"{tokens:,} tokens ({trie:,} as a trie)"
    )
    width = max(console.width - LABEL - 8 * len(COLUMNS) - TURNS, 16)
    longest = max(len(view.ids) for view in tree.views)
    for chain, union in tree.unions.items():
        numbers = [number for number, view in enumerate(tree.views) if view.chain == chain]
        yield _chain_title(tree, chain, len(union.ids), console.width)
        forks = [junction for junction in tree.junctions if junction.chain == chain]
        for order, number in enumerate(numbers):
            fork = forks[order - 1] if order else None
            start = 0
            if fork is not None:
                start = _column(fork.at, longest, width)
                before, after = tree.views[numbers[order - 1]], tree.views[number]
                for words in _fork_words(tree, fork, before, after, decode):
                    yield _beside(start + LABEL, words, console)
            yield _view_line(tree, number, start, 0 if fork is None else fork.at, longest, width, console)
            if decode is not None:
                yield from _said(tree, tree.views[number], decode)


def _chain_title(tree: Tree, chain: str, union: int, width: int) -> Text:
    words = chain
    if chain == MAIN_CHAIN and tree.compressed is not None:
        words += f"  (last context {len(tree.compressed.ids):,} of {union:,} tokens ever live)"
    room = width - 8 * len(COLUMNS) - TURNS
    line = Text(words if len(words) < room else chain, "bold")
    line.append(" " * (room - len(line)))
    return line.append("".join(f"{name:>8}" for name in COLUMNS) + "  turns", "dim not bold")


def _view_line(tree: Tree, number: int, start: int, at: int, longest: int, width: int, console: Console) -> Text:
    view, sampled = tree.views[number], tree.sampled
    mine = sampled.view == number
    line = Text(f"{number:>{LABEL - 1}} " + " " * start)
    cells = _cells(_kinds(tree, number)[at:], at, longest, width, start)
    for kind in cells:
        line.append(_character(console, kind), CELLS[kind][2])
    line.append(" " * (LABEL + width - len(line)))
    made, alive = int(mine.sum()), int((mine & (sampled.compressed >= 0)).sum())
    counts = (len(view.ids) - made, made, alive, int((mine & sampled.diverging).sum()))
    for count, style in zip(counts, ("", "green", "", "red")):
        line.append(f"{count:>8,}", style if count else "dim")
    return line.append(f"  {_ranges(view.turns)}")


def _kinds(tree: Tree, number: int) -> np.ndarray:
    """What every place of a view holds, as an index into ``CELLS``."""
    view, sampled, union = tree.views[number], tree.sampled, tree.unions[tree.views[number].chain]
    kinds = np.where(union.origin_turn[view.union] >= 0, CARRIED, CONTEXT)
    mine = np.flatnonzero(sampled.view == number)
    kinds[sampled.prefix[mine]] = np.where(sampled.diverging[mine], DIVERGING, SAMPLED)
    return kinds


def _column(at: int, longest: int, width: int) -> int:
    return min(at if longest <= width else at * width // longest, width - 1)


def _cells(kinds: np.ndarray, at: int, longest: int, width: int, start: int) -> list[int]:
    """One kind per cell of the bar that begins in column ``start`` and shows places ``at`` and on."""
    if not len(kinds):
        return []
    place = np.arange(at, at + len(kinds))
    column = place if longest <= width else place * width // longest
    column = np.clip(column, start, width - 1) - start
    shares = np.zeros((int(column.max()) + 1, len(CELLS)))
    np.add.at(shares, (column, kinds), 1)
    shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1)
    shares[:, CONTEXT] = 1
    return (shares >= TELLING).argmax(axis=1).tolist()


def _fork_words(tree: Tree, fork: Junction, before: View, after: View, decode: Decode | None) -> list[str]:
    name = (deed(tree, fork) or fork.reason).replace("_", " ")
    changes = [f"{count:,} {what}" for count, what in ((fork.evicted, "out"), (fork.inserted, "in")) if count]
    words = [f"turn {fork.turn}: {name} at {fork.at:,}" + "".join(f", {change}" for change in changes)]
    if decode is not None:
        gone, new = ~np.isin(before.union, after.union), ~np.isin(after.union, before.union)
        if fork.evicted:
            words.append("- " + head(decode, before.ids[gone], 24))
        if fork.inserted:
            words.append("+ " + head(decode, after.ids[np.flatnonzero(new)[: fork.inserted]], 24))
    return words


def _beside(column: int, words: str, console: Console) -> Text:
    """A stroke at ``column`` with words to the side that has room for them."""
    stroke = "|" if _ascii(console) else "│"
    right = console.width - column - 2
    if len(words) <= right or right >= column:
        return Text(" " * column).append(stroke, "yellow").append(" " + words)
    shown = words if len(words) < column else words[: column - 2] + ("." if _ascii(console) else "…")
    return Text(f"{shown:>{column - 1}} ").append(stroke, "yellow")


def _said(tree: Tree, view: View, decode: Decode) -> Iterator[Text]:
    for turn in view.turns:
        record = tree.rollout.turns[turn]
        notes = "" if record.purpose == "act" else f", {record.purpose}"
        notes += "" if record.trainable else ", not trainable"
        notes += ", cut off by length" if record.finish_reason == "length" else ""
        yield Text(f"{'':{LABEL}}turn {turn}{notes}: {head(decode, record.completion_ids, 32)}", "dim")


def _ranges(turns: Sequence[int]) -> str:
    """``0-2,5`` for 0, 1, 2, 5."""
    if not turns:
        return ""
    breaks = [k + 1 for k, (left, right) in enumerate(pairwise(turns)) if right != left + 1]
    runs = [turns[lo:hi] for lo, hi in pairwise([0, *breaks, len(turns)])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _ascii(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


def _character(console: Console, kind: int) -> str:
    return CELLS[kind][1 if _ascii(console) else 0]
