"""What a reader of an outside format is, and what it finds in a file.

A reader is a module of this package with four names (:class:`Reader`); ``detect.READERS`` lists them. It gives back
every record of its file as part of one of these, so that nothing is dropped without a word:

``Found``    a rollout, and how many records it was made of
``Refusal``  a record that cannot be used: file, line, field and reason
``Remark``   "merged": a record that another one already says (a call written down twice); "empty": one in which nothing
             was sampled (a failed call); "warning": not a record, but something to know about the rollouts
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.record import Rollout, Sampling
from mwjax.rollouts.validate import parse_sampling


class Found(NamedTuple):
    """``line``: of the rollout's first record, from 1. ``records``: how many records of the file it was made of.
    ``responses``: of every turn, the name of its response, where the log has one."""

    rollout: Rollout
    line: int
    records: int
    responses: tuple[Hashable, ...] = ()


class Remark(NamedTuple):
    """``line`` is 0 where the remark is about the whole file. Equal reasons are counted together."""

    kind: Literal["merged", "empty", "warning"]
    file: str
    line: int
    reason: str


Item = Found | Refusal | Remark


class Head(NamedTuple):
    """The beginning of a file, decompressed: its first bytes, and the JSON records that could be parsed from them.

    ``records`` holds the first lines of JSON Lines, the first elements of one JSON array, or one whole JSON document.
    ``damage``: why the first line that is no JSON is none.
    """

    path: str
    data: bytes
    records: tuple[Any, ...]
    damage: str = ""


DEFAULT_SAMPLING = Sampling()


@dataclass(frozen=True)
class Options:
    """What the user says beyond the files.

    ``group_by`` and ``reward``: dotted fields of a record (``request.metadata.task``) that name its group and hold its
    reward; ``session_by`` the same for the rollout that a call belongs to. ``logprobs``: of which distribution the
    recorded log-probs are, "auto" for what is known of the engine. ``sampling``: settings where a record names none.
    ``vocab_size``: ids at or beyond it are refused.
    ``tokenizer``, ``template``: a tokenizer.json or model folder, and a chat template file, for formats without ids and
    for telling re-tokenised text; ``template_options``: variables of the template. ``normalise_system``: give all calls
    of a conversation the first one's system prompt where theirs differs in a few lines. ``opening``, ``tools``: the
    system message, any messages between it and the first of a log, and the tools, for logs without them
    (:mod:`supplied`). ``progress``: called with the file and the bytes read of it so far.
    """

    group_by: str | None = None
    reward: str | None = None
    session_by: str | None = None
    logprobs: Literal["auto", "raw", "processed"] = "auto"
    sampling: Sampling = DEFAULT_SAMPLING
    tokenizer: str | None = None
    template: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    normalise_system: bool = False
    opening: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] | None = None
    vocab_size: int | None = None
    progress: Callable[[str, int], None] | None = None


def sampling_of(settings: Iterable[str]) -> Sampling:
    """``Options.sampling`` from words such as "temperature=0.6". Raises RecordError."""
    values: dict[str, Any] = {}
    for word in settings:
        key, _, value = word.partition("=")
        try:
            values[key] = int(value) if key == "top_k" else float(value)
        except ValueError:
            raise RecordError(key, f"is {value!r}, must be a number, as in temperature=0.6") from None
    return parse_sampling(values, "sampling")


class Reader(Protocol):
    """The module's interface. NAME is what ``--format`` takes; DESCRIPTION one line for the list of formats.

    ``looks_like`` must be sure: at most one reader may claim a file. ``read`` holds one rollout in memory where the
    format allows it, raises RolloutFileError where the file cannot be read, and nothing for a bad record.
    """

    NAME: str
    DESCRIPTION: str

    def looks_like(self, head: Head) -> bool: ...

    def read(self, path: str, options: Options) -> Iterator[Item]: ...
