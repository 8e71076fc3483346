"""Is this data conditioning-consistent? Rollouts in, one :class:`AuditResult` out. Only ``models`` import jax."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from mwjax.audit.comparison import short_names
from mwjax.audit.facts import RolloutFacts, rollout_facts
from mwjax.audit.model_result import ModelAudit
from mwjax.audit.result import AffectedRollout, AuditResult, MethodAudit
from mwjax.audit.row_matching import RowsFacts, check_rows
from mwjax.audit.rows_summary import rows_audit
from mwjax.audit.text import decoder
from mwjax.audit.training_rows import read_rows
from mwjax.audit.verdict import judge, warnings
from mwjax.rollouts.lines import is_pipe
from mwjax.rollouts.read import Refusal, entries
from mwjax.rollouts.record import Rollout
from mwjax.tree import METHODS, Tree, TreeError, build, build_trie

# What refusals of rollouts that come from no file name as their file.
IN_MEMORY = "rollouts"
# Called after every line read: (file, bytes of it so far).
Progress = Callable[[str, int], None]


class Loaded(NamedTuple):
    """One line of the input: where it stood, and its tree or why it is refused."""

    file: str
    line: int
    item: Tree | Refusal


def run(
    source: epath.PathLike | Iterable[epath.PathLike] | Iterable[Rollout],
    *,
    rows: epath.PathLike | None = None,
    tokenizer: Any | None = None,
    shown: int = 5,
    group_tries: bool = True,
    progress: Progress | None = None,
    models: Sequence[Any] = (),
    rollouts_scored: int | None = None,
    scoring: Callable[[str, int, int], None] | None = None,
) -> AuditResult:
    """Audit rollouts, with ``rows`` a user's own training rows against them, and with ``models`` what models say.

    Args:
        source: a rollout file, several, or rollouts.
        rows: JSON Lines of training rows (see :mod:`mwjax.audit.training_rows`).
        tokenizer: path of a ``tokenizer.json`` or an object with ``decode``, for the texts shown.
        shown: how many mismatches and most affected rollouts to list.
        group_tries: also build the tries of whole groups; keeps all view ids in memory.
        progress: called after every line read.
        models: folders or hub ids, or :class:`mwjax.audit.model_audit.Model`: score some of the rollouts with each.
        rollouts_scored: how many (default: as many as take the largest model a minute or two of CPU), spread over the
            groups.
        scoring: called with (what, rows done, rows in all) while a model works.

    What cannot be read, and edits that contradict the turns, are in ``refused``.

    Raises:
        RolloutFileError: a file cannot be read at all.
        ModelFilesError, UnsupportedModelError: a model cannot be loaded.
        ValueError: a model has a smaller vocabulary than the rollouts; or models are to read rollouts from a pipe.
    """
    source = list(source) if not isinstance(source, (str, os.PathLike)) else source
    loaded_models = load_models(source, models)
    sizes: list[Any] = []
    decode = decoder(tokenizer)
    training_rows = None if rows is None else read_rows(rows)
    facts: list[RolloutFacts] = []
    refused: list[Refusal] = []
    checked: list[RowsFacts] = []
    unnamed: list[int] = []
    groups: dict[tuple[str, str], list[np.ndarray]] = {}
    files, loaded = load(source, progress)
    for _, _, item in loaded:
        if isinstance(item, Refusal):
            refused.append(item)
            continue
        facts.append(rollout_facts(item))
        if loaded_models:
            from mwjax.audit.model_audit import size_of

            sizes.append(size_of(item))
        rollout = item.rollout
        if group_tries:
            key = ("rollout", rollout.id) if rollout.group is None else ("group", rollout.group)
            groups.setdefault(key, []).extend(view.ids for view in item.views)
        if training_rows is None:
            continue
        if rollout.id in training_rows.of_rollout:
            own = training_rows.of_rollout[rollout.id]
            checked.append(check_rows(item, own, training_rows.file, decode, shown))
        else:
            unnamed.append(int(item.sampled.trainable.sum()))
    group_tokens = [len(build_trie(views).tokens) for views in groups.values()] if group_tries else None
    result = summarise(facts, refused, files, group_tokens, shown)
    if loaded_models and facts:
        scores = _score(source, loaded_models, sizes, rollouts_scored, scoring)
        result = dataclasses.replace(result, models=scores)
    if training_rows is None:
        return result
    known = {fact.id for fact in facts}
    return dataclasses.replace(result, rows=rows_audit(training_rows, checked, known, unnamed, shown))


def load_models(source: Any, models: Sequence[Any]) -> list[Any]:
    """The models to score a source with, under names that tell them apart. Raises as :func:`run`."""
    if not models:
        return []
    for path in [source] if isinstance(source, (str, os.PathLike)) else source:
        if not isinstance(path, Rollout) and is_pipe(path):
            raise ValueError(f"{path}: a pipe can be read only once, and a model needs it twice: write it to a file")
    from mwjax.audit.model_audit import Model, load_model

    loaded = [load_model(model) for model in models]
    if len({model.name for model in loaded}) == len(loaded):
        return loaded
    names = short_names([model.name if isinstance(model, Model) else model for model in models])
    return [model._replace(name=name) for model, name in zip(loaded, names)]


def _score(
    source: Any,
    models: Sequence[Any],
    sizes: Sequence[Any],
    rollouts: int | None,
    progress: Callable[[str, int, int], None] | None,
) -> tuple[ModelAudit, ...]:
    """Read the source again, keep the chosen rollouts only, and score them: the same ones with every model."""
    from mwjax.audit.model_audit import choose, score

    chosen = choose(sizes, max(model.parameters for model in models), rollouts)
    trees = {}
    for _, _, item in load(source)[1]:
        if isinstance(item, Tree) and item.rollout.id in chosen:
            trees[item.rollout.id] = item
    return tuple(score(model, list(trees.values()), of=len(sizes), progress=progress) for model in models)


def load(
    source: epath.PathLike | Iterable[epath.PathLike] | Iterable[Rollout], progress: Progress | None = None
) -> tuple[tuple[str, ...], Iterator[Loaded]]:
    """The files named by ``source``, and their trees and refusals one by one, in order."""
    given: list[Any] = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    if given and all(isinstance(item, Rollout) for item in given):
        return (), _trees((IN_MEMORY, number, rollout) for number, rollout in enumerate(given, start=1))
    return tuple(str(path) for path in given), _trees(_lines(given, progress))


def _lines(paths: Sequence[Any], progress: Progress | None) -> Iterator[tuple[str, int, Rollout | Refusal]]:
    for path in paths:
        for line, item in entries(path):
            yield str(path), line.number, item
            if progress is not None:
                progress(str(path), line.offset + len(line.data) + 1)


def _trees(lines: Iterable[tuple[str, int, Rollout | Refusal]]) -> Iterator[Loaded]:
    where: dict[str, str] = {}
    for file, line, item in lines:
        if isinstance(item, Refusal):
            yield Loaded(file, line, item)
            continue
        if item.id in where:
            reason = f"{item.id!r} was already used in {where[item.id]}"
            yield Loaded(file, line, Refusal(file, line, "id", reason))
            continue
        try:
            tree: Tree | Refusal = build(item)
        except TreeError as error:
            tree = Refusal(file, line, error.field, error.reason)
        else:
            where[item.id] = f"{file}, line {line}"
        yield Loaded(file, line, tree)


def summarise(
    facts: Sequence[RolloutFacts],
    refused: Sequence[Refusal],
    files: Sequence[str],
    group_tokens: Sequence[int] | None,
    shown: int,
) -> AuditResult:
    """Add up what single rollouts said."""

    def total(name: str) -> int:
        return sum(getattr(fact, name) for fact in facts)

    def counted(name: str) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for fact in facts:
            counts.update(getattr(fact, name))
        return dict(counts.most_common())

    sampled, untrainable, views = total("sampled"), total("untrainable"), total("view_tokens")
    common = total("common_survivors")
    methods = {name: _method(name, facts, sampled - untrainable, common) for name in METHODS}
    junctions = counted("reasons")
    spans = [span for fact in facts for span in fact.evicted_spans]
    shares = [fact.compressed_share for fact in facts]
    fired = [share for share in shares if share > 0]
    consistent, verdict, advice = judge(methods, sum(junctions.values()), total("side_chains"))
    return AuditResult(
        files=tuple(files),
        rollouts=len(facts),
        refused=tuple(refused),
        turns=total("turns"),
        chains=total("chains"),
        views=total("views"),
        view_tokens=views,
        trie_tokens=total("trie_tokens"),
        trie_ratio=_share(views, total("trie_tokens")),
        groups=None if group_tokens is None else len(group_tokens),
        group_trie_tokens=None if group_tokens is None else sum(group_tokens),
        group_trie_ratio=None if group_tokens is None else _share(views, sum(group_tokens)),
        sampled_tokens=sampled,
        loss_tokens=sampled - untrainable,
        untrainable_tokens=untrainable,
        untrainable_share=_share(untrainable, sampled),
        tokens_with_logprobs=sampled - total("without_logprobs"),
        tokens_without_logprobs=total("without_logprobs"),
        truncated_turns=total("truncated_turns"),
        junctions=junctions,
        details=counted("details"),
        side_junctions=counted("side_reasons"),
        forks_per_rollout=_share(sum(junctions.values()), len(facts)),
        evictions=len(spans),
        evictions_per_rollout=_share(len(spans), len(facts)),
        diverging_leaves=total("diverging"),
        diverging_per_rollout=_share(total("diverging"), len(facts)),
        evicted_span_mean=_share(sum(spans), len(spans)),
        depth=_share(sum(fired), len(fired)),
        frequency=_share(len(fired), len(shares)),
        common_survivors=common,
        methods=tuple(methods.values()),
        most_affected=_most_affected(facts, shown),
        warnings=warnings(
            counted("sampling"),
            sampled=sampled,
            without_logprobs=total("without_logprobs"),
            truncated_turns=total("truncated_turns"),
            turns=total("turns"),
            untrainable=untrainable,
            without_loss=[fact.id for fact in facts if fact.sampled == fact.untrainable],
            without_main=[fact.id for fact in facts if fact.chains == fact.side_chains],
        ),
        consistent=consistent,
        verdict=verdict,
        advice=advice,
    )


def _method(name: str, facts: Sequence[RolloutFacts], trainable: int, common: int) -> MethodAudit:
    of_rollouts = [fact.methods[name] for fact in facts]

    def total(field: str) -> int:
        return sum(getattr(found, field) for found in of_rollouts)

    def histogram(field: str) -> tuple[int, ...]:
        counts = np.sum([getattr(found, field) for found in of_rollouts], axis=0) if of_rollouts else np.zeros(1)
        return tuple(np.trim_zeros(counts, "b").astype(int).tolist())

    loss_tokens, wrong = total("loss_tokens"), total("wrong")
    return MethodAudit(
        method=name,
        loss_tokens=loss_tokens,
        lost=trainable - loss_tokens,
        wrong=wrong,
        wrong_share=_share(wrong, loss_tokens),
        indirect=total("indirect"),
        indirect_share=_share(total("indirect"), loss_tokens),
        common_wrong=total("common_wrong"),
        common_wrong_share=_share(total("common_wrong"), common),
        missing_mean=_share(total("missing"), wrong),
        missing_max=max((found.missing_most for found in of_rollouts), default=0),
        extra_mean=_share(total("extra"), wrong),
        extra_max=max((found.extra_most for found in of_rollouts), default=0),
        row_tokens=total("row_tokens"),
        teacher_tokens=total("teacher_tokens"),
        missing_histogram=histogram("missing_histogram"),
        extra_histogram=histogram("extra_histogram"),
    )


def _most_affected(facts: Sequence[RolloutFacts], shown: int) -> tuple[AffectedRollout, ...]:
    found = [
        AffectedRollout(fact.id, sum(fact.reasons.values()), compressed.wrong, compressed.loss_tokens)
        for fact in facts
        if (compressed := fact.methods["naive_compressed"]).wrong
    ]
    return tuple(sorted(found, key=lambda one: (-one.wrong, one.id))[:shown])


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
