"""The figures of an audit as rows of text, for the terminal and the HTML page alike."""

from __future__ import annotations

from collections.abc import Mapping

from mwjax.audit.result import AuditResult, MethodAudit, Mismatch, RowsAudit
from mwjax.audit.verdict import percent

METHOD_HEADERS = (
    "method",
    "loss tokens",
    "lost",
    "wrong prefix",
    "wrong, common",
    "missing mean/max",
    "extra mean/max",
    "row tokens",
)
METHOD_LEGEND = (
    "wrong prefix: share of a method's loss tokens whose training prefix is not the one they were sampled under; "
    "common: the same, of the {common:,} tokens that every method trains. missing, extra: tokens of the prefix, over "
    "the wrong ones. lost: trainable sampled tokens that get no loss."
)

Facts = list[tuple[str, str]]


def short(number: float | None) -> str:
    """A count in at most six characters."""
    if number is None:
        return "N/A"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= (100e3 if unit == "k" else size):
            return f"{number / size:.3g}{unit}"
    return f"{number:,.0f}"


def method_rows(result: AuditResult) -> list[tuple[str, ...]]:
    """One row per method, under ``METHOD_HEADERS``."""
    return [
        (
            found.method,
            short(found.loss_tokens),
            short(found.lost),
            percent(found.wrong_share),
            percent(found.common_wrong_share),
            _mean_and_max(found, found.missing_mean, found.missing_max),
            _mean_and_max(found, found.extra_mean, found.extra_max),
            short(found.row_tokens + found.teacher_tokens),
        )
        for found in result.methods
    ]


def _mean_and_max(method: MethodAudit, mean: float | None, most: int) -> str:
    if mean is None or not method.wrong:
        return "-"
    return f"{mean:.1f}/{most}" if mean < 10 else f"{short(round(mean))}/{short(most)}"


def notes(result: AuditResult) -> list[str]:
    """What the table of methods cannot say."""
    said = []
    union, student = result.method("union"), result.method("sdcc")
    if union.indirect:
        said.append(
            f"union: {percent(union.indirect_share)} of its loss tokens see the right ids, but through keys that were "
            "computed while evicted text was in view, or at other position ids."
        )
    if student.teacher_tokens:
        said.append(
            f"sdcc: its task loss is naive_compressed; the teacher puts the {result.diverging_leaves:,} diverging "
            f"leaves under their own prefix ({student.teacher_tokens:,} teacher tokens)."
        )
    return said


def context_facts(result: AuditResult) -> Facts:
    """What happened to the contexts."""
    facts = [("forks of main (K)", _per_rollout(sum(result.junctions.values()), result.forks_per_rollout))]
    facts.append(("  by reason", counts(result.junctions)))
    if result.details:
        facts.append(("  by what was done", counts(result.details)))
    evicted = _per_rollout(result.evictions, result.evictions_per_rollout)
    if result.evicted_span_mean is not None:
        evicted += f", {result.evicted_span_mean:,.1f} tokens each"
    facts.append(("evictions (paper's K)", evicted))
    facts.append(("diverging leaves (D)", _per_rollout(result.diverging_leaves, result.diverging_per_rollout)))
    fired = percent(result.frequency)
    facts.append(("compression", f"depth {percent(result.depth)} of the context, in {fired} of the rollouts"))
    if result.side_junctions:
        facts.append(("forks of side chains", counts(result.side_junctions)))
    packed = f"{_ratio(result.trie_ratio)} ({result.view_tokens:,} view tokens, {result.trie_tokens:,} in tries)"
    if result.group_trie_tokens is not None and result.groups != result.rollouts:
        packed += f"; over groups {_ratio(result.group_trie_ratio)} ({result.group_trie_tokens:,})"
    return [*facts, ("trie ratio", packed)]


def token_facts(result: AuditResult) -> Facts:
    """What was recorded."""
    return [
        ("rollouts", f"{result.rollouts:,} read, {len(result.refused):,} refused"),
        ("turns, chains, views", f"{result.turns:,}, {result.chains:,}, {result.views:,}"),
        (
            "sampled tokens",
            f"{result.sampled_tokens:,}, of which {result.untrainable_tokens:,} not trainable "
            f"({percent(result.untrainable_share)})",
        ),
        (
            "log-probs",
            f"{result.tokens_with_logprobs:,} tokens with, {result.tokens_without_logprobs:,} without",
        ),
        ("cut off by length", f"{result.truncated_turns:,} of {result.turns:,} completions"),
    ]


def rows_facts(rows: RowsAudit) -> Facts:
    """What a user's rows train."""

    def share(count: int) -> str:
        return f"{count:,} ({percent(count / rows.loss_tokens)})" if rows.loss_tokens else f"{count:,}"

    facts = [
        (
            "rows",
            f"{rows.rows:,} checked, {len(rows.refused):,} refused; {rows.segments:,} segments, {rows.tokens:,} tokens",
        ),
        ("loss tokens", f"{rows.loss_tokens:,}"),
        ("  exact", share(rows.exact)),
        ("  wrong prefix", share(rows.wrong_prefix)),
        ("  not sampled", share(rows.not_sampled)),
    ]
    facts += [("  turn not trainable", share(rows.untrainable))] if rows.untrainable else []
    facts += [("  without any context", share(rows.without_context))] if rows.without_context else []
    facts.append(("position ids with gaps", share(rows.position_gaps)))
    facts.append(("counted double", f"{rows.double:,} sampled tokens, {rows.surplus:,} times too many"))
    never = f"{rows.never:,} trainable sampled tokens"
    if rows.unnamed_rollouts:
        never += f", {rows.unnamed_tokens:,} of them in {rows.unnamed_rollouts:,} rollouts without any row"
    facts.append(("never trained", never))
    if rows.ignored_keys:
        facts.append(("keys left alone", ", ".join(rows.ignored_keys)))
    return facts


def mismatch_facts(found: Mismatch) -> tuple[str, Facts]:
    """(headline, details) of one mismatch."""
    where = f"line {found.line}, position {found.position}"
    if found.segment:
        where += f" (segment {found.segment})"
    more = f" and {found.tokens - 1:,} more" if found.tokens > 1 else ""
    headline = f"{where}: token {found.token_text}{more}, rollout {found.rollout!r}"
    if found.turn is None or found.expected_length is None:
        return headline, [("not sampled", "the policy did not write this token"), ("after", found.found or "nothing")]
    who = "sampled as" if found.certain else "most likely sampled as"
    details = [
        (who, f"token {found.index} of turn {found.turn}, under {found.expected_length:,} tokens"),
        ("here", f"under {found.found_length:,} tokens; the first {found.agree:,} agree, then"),
        ("  sampled under", found.expected or "(nothing more)"),
        ("  trained under", found.found or "(nothing more)"),
    ]
    return headline, details


def plural(number: int, noun: str) -> str:
    """``1 fork``, ``2 forks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def counts(of: Mapping[str, int]) -> str:
    """``deletion 3, replacement 1``."""
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in of.items()) or "none"


def _per_rollout(count: int, mean: float | None) -> str:
    return f"{count:,}" if mean is None else f"{count:,} ({mean:.2f} per rollout)"


def _ratio(ratio: float | None) -> str:
    return "N/A" if ratio is None else f"{ratio:.2f}"
