"""``--debug``: one rollout token by token as the rows hold it, and NaNs found in the operation that made them."""

from __future__ import annotations

import contextlib
import math
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from rich.text import Text

from mwjax import model
from mwjax.train.config import RunConfig
from mwjax.train.step import Step
from mwjax.tree import Batch, Rows

TAIL = 8  # of a prefix, the last tokens that are kept
SHOWN_TOKENS, SHOWN_CONTEXT = 100, 12
CHECKED = ("accumulate", "apply", "score", "score_exact")

TextOf = Callable[[int], str]
Score = Callable[[Rows], np.ndarray]


class Row(NamedTuple):
    """What follows stands in this row of this micro-batch, both from 0."""

    microbatch: int
    row: int


class Context(NamedTuple):
    """A run of tokens without a loss: ids."""

    ids: tuple[int, ...]


class Fork(NamedTuple):
    """From here on ``hidden`` tokens that were visible no longer are, and ``kept`` still are; none where another
    sequence begins in the row."""

    hidden: int
    kept: int


class Sampled(NamedTuple):
    """A loss token. prefix: how many tokens it is conditioned on, tail: the ids of the last of them. recorded: log-prob
    the engine gave, now: under the current weights, ratio: now against what the loss compares with; NaN if unknown."""

    view: int
    turn: int
    index: int  # type: ignore[assignment]  # (hides tuple.index, which nobody needs here)
    token: int
    prefix: int
    tail: tuple[int, ...]
    weight: float
    advantage: float
    recorded: float
    now: float
    ratio: float


Item = Row | Context | Fork | Sampled


def first_rollout(batches: Sequence[Batch]) -> int | None:
    """Number of the first rollout with a loss token; None without any."""
    for batch in batches:
        edges = batch.rows.edges
        active = edges.weight != 0
        if active.any():
            return int(edges.rollout[active][0])
    return None


def listing(batches: Sequence[Batch], rollout: int, now: Score, old: Score | None = None) -> Iterator[Item]:
    """What the rows say of one rollout, row by row and in row order, read from tokens, mask and edges alone.

    batches: micro-batches in numpy, not placed. now: the log-probs [B, E] of rows' edges under the current weights;
    old: those the loss divides by (default: ``old_logprob`` where known, else ``rollout_logprob``).
    """
    for number, batch in enumerate(batches):
        edges = batch.rows.edges
        mine = (edges.weight != 0) & (edges.rollout == rollout)
        if not mine.any():
            continue
        recorded = np.where(np.isnan(edges.old_logprob), edges.rollout_logprob, edges.old_logprob)
        scores, behaviour = now(batch.rows), recorded if old is None else old(batch.rows)
        for row in np.flatnonzero(mine.any(axis=1)).tolist():
            yield Row(number, row)
            yield from _row(batch.rows, row, np.flatnonzero(mine[row]), scores[row], behaviour[row])


def _row(rows: Rows, row: int, mine: np.ndarray, now: np.ndarray, behaviour: np.ndarray) -> Iterator[Item]:
    tokens, until, edges = rows.tokens[row], rows.visible_until[row], rows.edges
    parent, target = edges.parent[row], edges.target[row]
    seen = {int(p): _visible(until, int(p)) for p in np.unique(parent[mine])}
    sampled = {(int(parent[edge]), int(target[edge])) for edge in mine}
    at_parent: dict[int, list[int]] = {}
    for edge in mine[np.lexsort((edges.index[row, mine], edges.turn[row, mine]))].tolist():
        at_parent.setdefault(int(parent[edge]), []).append(edge)
    context: list[int] = []
    before = np.zeros(0, np.int64)
    for place in np.unique(np.concatenate(list(seen.values()))).tolist():
        visible = _visible(until, place)
        hidden = len(before) - int(np.isin(before, visible).sum())
        if context and (hidden or at_parent.get(place - 1)):
            yield Context(tuple(context))
            context.clear()
        if hidden:
            yield Fork(hidden, len(visible) - 1)
        above = int(visible[-2]) if len(visible) > 1 else -1
        if (above, int(tokens[place])) not in sampled:
            context.append(int(tokens[place]))
        for edge in at_parent.get(place, ()):
            if context:
                yield Context(tuple(context))
                context.clear()
            yield Sampled(
                view=int(edges.view[row, edge]),
                turn=int(edges.turn[row, edge]),
                index=int(edges.index[row, edge]),
                token=int(target[edge]),
                prefix=len(visible),
                tail=tuple(tokens[visible[-TAIL:]].tolist()),
                weight=float(edges.weight[row, edge]),
                advantage=float(edges.advantage[row, edge]),
                recorded=float(edges.rollout_logprob[row, edge]),
                now=float(now[edge]),
                ratio=float(np.exp(np.float64(now[edge]) - np.float64(behaviour[edge]))),
            )
        before = visible


def _visible(until: np.ndarray, place: int) -> np.ndarray:
    """The row positions that position ``place`` sees, itself included: int64 [N], ascending."""
    return np.flatnonzero(until[: place + 1] > place)


COLUMNS = (("view", 4), ("turn[i]", 8), ("prefix", 6), ("", 0), ("weight", 6), ("advan.", 7))
FIGURES = (("recorded", 8), ("now", 8), ("ratio", 7))


def lines(
    items: Iterable[Item], title: str, width: int, text_of: TextOf | None = None, limit: int = SHOWN_TOKENS
) -> Iterator[Text]:
    """A listing for people, ``width`` columns wide, up to ``limit`` loss tokens."""
    yield Text(title, "bold", overflow="fold")
    yield Text("prefix: how many tokens are seen; then the last of them > the sampled one", "dim")
    yield Text("recorded, now: its log-prob by the engine, by these weights; ratio: now to old", "dim")
    room = width - sum(size + 1 for _, size in COLUMNS + FIGURES) + 1
    yield Text(" ").join(_cell(name, size or room, right=bool(size), style="bold") for name, size in COLUMNS + FIGURES)
    shown = left = 0
    for item in items:
        if shown == limit:
            left += isinstance(item, Sampled)
            continue
        match item:
            case Row():
                yield Text(f"micro-batch {item.microbatch}, row {item.row}", "bold cyan")
            case Context():
                yield _context(item, width, text_of)
            case Fork(hidden, kept):
                words = f"fork: {hidden} tokens hidden from here on, {kept} stay" if kept else "a sequence of its own"
                yield Text(f"     < {words}", "yellow")
            case Sampled():
                shown += 1
                yield _sampled(item, room, text_of)
    if left:
        yield Text(f"... {left} more loss tokens", "dim")


def _sampled(item: Sampled, room: int, text_of: TextOf | None) -> Text:
    new = f"{item.token}" if text_of is None else f"{item.token} {text_of(item.token)}"
    before, seen = "..", ""
    for count, token in enumerate(reversed(item.tail), 1):
        seen = f"{token} {seen}"
        longer = seen if count == item.prefix else f".. {seen}"
        if len(longer) + len("> ") + len(new) > room:
            break
        before = longer
    middle = Text(before.strip() + " ", "dim")
    middle.append("> ", "dim").append(new, "bold green")
    middle.truncate(room, pad=True)
    cells = [
        _cell(str(item.view), 4),
        _cell(f"{item.turn}[{item.index}]", 8),
        _cell(str(item.prefix), 6),
        middle,
        _cell(f"{item.weight:.4g}", 6),
        _cell(_short(item.advantage, "+.3f"), 7),
        _cell(_short(item.recorded, ".4f"), 8),
        _cell(_short(item.now, ".4f"), 8),
        _cell(_short(item.ratio, ".4f"), 7),
    ]
    return Text(" ").join(cells)


def _context(item: Context, width: int, text_of: TextOf | None) -> Text:
    count = len(item.ids)
    few = item.ids if count <= SHOWN_CONTEXT else (*item.ids[: SHOWN_CONTEXT // 2], None, *item.ids[-4:])
    shown = [".." if token is None else str(token) if text_of is None else text_of(token) for token in few]
    text = Text(f"     + {count} context: {' '.join(shown)}", "dim", no_wrap=True)
    text.truncate(width, overflow="ellipsis" if text_of is not None else "crop")
    return text


def _cell(words: str, size: int, *, right: bool = True, style: str = "") -> Text:
    return Text(f"{words:>{size}}" if right else f"{words:<{size}}", style)


def _short(value: float, form: str) -> str:
    if math.isnan(value):
        return "-"
    text = f"{value:{form}}"
    return text if len(text) <= 8 else f"{value:.1e}"


def text_of(config: RunConfig) -> TextOf | None:
    """Texts of token ids by ``config.tokenizer``, else by the model's tokenizer.json; None without one.

    Raises ValueError where ``config.tokenizer`` cannot be read."""
    from tokenizers import Tokenizer

    if config.tokenizer is not None:
        try:
            tokenizer = Tokenizer.from_str(epath.Path(config.tokenizer).read_text())
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ValueError(f"tokenizer: {config.tokenizer}: cannot be read as a tokenizer.json: {error}") from error
    else:
        try:
            tokenizer = Tokenizer.from_str(_tokenizer_of_model(config))
        except Exception:
            return None
    return lambda token: ascii(tokenizer.decode([token], skip_special_tokens=False))


def _tokenizer_of_model(config: RunConfig) -> str:
    if config.model.small is not None:
        return epath.Path(config.model.small.tokenizer or "").read_text()
    with model.local_folder(config.model.path or "", weights=False) as folder:
        return (folder / "tokenizer.json").read_text(encoding="utf-8")


class NotANumber(ValueError):
    """A NaN came up while a step was computed."""


def checked(step: Step, ids: Sequence[str]) -> Step:
    """``step`` with every operation's result checked for NaN, as long as it runs without jit. Its functions raise
    `NotANumber`, naming micro-batch, rollouts (``ids`` by number), operation and source line."""
    microbatch = 0

    def zero() -> Any:
        nonlocal microbatch
        microbatch = 0
        return step.zero()

    def watch(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal microbatch
            try:
                with jax.debug_nans(True):
                    result = getattr(step, name)(*arguments)
            except FloatingPointError as error:
                where = f"micro-batch {microbatch}" if name == "accumulate" else name
                raise NotANumber(f"{where}{_rollouts(arguments, ids)}: {error}{_line(error)}") from error
            microbatch += name == "accumulate"
            return result

        return call

    return step._replace(zero=zero, **{name: watch(name) for name in CHECKED})


@contextlib.contextmanager
def naming(step: int) -> Iterator[None]:
    """Puts the number of the step (from 1) before what `checked` reports."""
    try:
        yield
    except NotANumber as error:
        raise NotANumber(f"step {step}, {error}") from error.__cause__


def _rollouts(arguments: Sequence[Any], ids: Sequence[str]) -> str:
    rows = next((a.rows if isinstance(a, Batch) else a for a in arguments if isinstance(a, Batch | Rows)), None)
    if rows is None:
        return ""
    numbers = np.unique(np.asarray(rows.edges.rollout)[np.asarray(rows.edges.weight) != 0])
    return f" (rollouts {', '.join(ids[number] for number in numbers)})"


def _line(error: Exception) -> str:
    """The line of mwjax the error comes from."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename).startswith(package)]
    if not frames:
        return ""
    last = frames[-1]
    return f", in {last.name} ({os.path.relpath(last.filename, os.path.dirname(package))}:{last.lineno})"
