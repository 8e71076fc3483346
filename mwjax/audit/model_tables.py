"""What a model says of rollouts as rows of text, for the terminal and the HTML page alike."""

from __future__ import annotations

from mwjax.audit.model_result import Delta, KLGroup, ModelAudit
from mwjax.audit.verdict import percent

LOGDIFF_HEADERS = ("method", "tokens", "mean", "max", "signed mean")
DELTA_HEADERS = ("", "of", "tokens", "mean", "expected sign")
KL_HEADERS = ("", "leaves", "mean KL", "max KL", "mean |delta_comp|")
PAPER = "paper: "


def scored_of(model: ModelAudit) -> str:
    """How many rollouts were scored."""
    said = f"{len(model.scored):,} of {model.rollouts:,} rollouts scored"
    return said if len(model.scored) == model.rollouts else f"{said} (--rollouts N for more)"


def logdiff_rows(model: ModelAudit) -> list[tuple[str, ...]]:
    """One row per method, under ``LOGDIFF_HEADERS``."""
    return [
        (found.method, f"{found.tokens:,}", size(found.mean), size(found.max_token), size(found.signed_mean, "+"))
        for found in model.methods
    ]


def delta_rows(model: ModelAudit) -> list[tuple[str, ...]]:
    """Our figures, then the paper's, under ``DELTA_HEADERS``."""
    rows: list[tuple[str, ...]] = [
        (found.name, found.of, f"{found.tokens:,}", _signed(found.mean), _share(found.share_expected, found))
        for found in model.deltas
    ]
    for theirs in model.published:
        for name, tokens, mean, share, sign in (
            ("delta_comp", theirs.n_comp, theirs.mean_delta_comp, theirs.frac_negative, "-"),
            ("delta_full", theirs.n_full, theirs.mean_delta_full, theirs.frac_positive, "+"),
        ):
            cells = (f"{tokens:,}", _signed(mean), f"{sign} {percent(share)}")
            rows.append((f"{PAPER}{name}", theirs.harness, *cells))
    return rows


def kl_rows(model: ModelAudit) -> list[tuple[str, ...]]:
    """All leaves, then by distance, junction and missing tokens, under ``KL_HEADERS``."""
    rows = [_kl_row("all", model.kl)]
    rows += [_kl_row(f"distance {group.label}", group) for group in model.kl_by_distance]
    rows += [_kl_row(group.label, group) for group in model.kl_by_junction]
    return rows + [_kl_row(f"missing {group.label}", group) for group in model.kl_by_missing]


def model_notes(model: ModelAudit) -> list[str]:
    """What the tables mean, and what they cannot say. Natural logs throughout."""
    said = ["logdiff: |log p in the training row - log p recorded|, nats a token; sdcc: of its student."]
    reasons = dict.fromkeys(found.reason for found in model.methods if found.reason)
    said += [f"logdiff N/A: {reason}." for reason in reasons]
    if not reasons and (model.without_logprobs or model.unmatched):
        said.append(
            f"left out of logdiff: {model.without_logprobs:,} loss tokens without a recorded log-prob, "
            f"{model.unmatched:,} processed by top-p, top-k or temperature 0, which no training row can match."
        )
    if model.exact is False:
        said.append(
            f"Warning: {model.model}: packed does not reproduce the recorded log-probs: other weights, or an engine "
            "that rounds otherwise. That difference is in every logdiff; the figures below it compare this model with "
            "itself."
        )
    said += [
        "delta_comp: log p in the last context - log p under the generation prefix, at diverging leaves. delta_full: "
        "log p after all that was ever live - log p under the generation prefix, of tokens sampled while something was "
        "evicted; delta_full_walk: the same tokens, against their log p in the last context, where they survive.",
        "expected sign: the share of tokens with the sign MemoryWalker expects. Tokens that this very model sampled at "
        "temperature 1 lose log-prob on average under any other prefix (by the KL), so delta_full then tends below 0.",
        f"{PAPER}MemoryWalker's Table 7, on its models and harnesses, to compare with; not measured here.",
        "Conditioning KL: KL(pi(. | generation prefix) || pi(. | prefix in the last context)), whole vocabulary, "
        "temperature 1. distance: how many tokens directly before the leaf both prefixes share; 0 is the first token "
        "behind the cut. Junctions: the first that put the leaf under another context. missing: tokens of the "
        "generation prefix that the last context lacks.",
    ]
    return said


def _kl_row(name: str, group: KLGroup) -> tuple[str, ...]:
    return (name, f"{group.leaves:,}", size(group.mean_kl), size(group.max_kl), size(group.mean_abs_delta))


def size(number: float | None, sign: str = "") -> str:
    """Nats, which range over orders of magnitude."""
    return "N/A" if number is None else format(number, f"{sign}.2g")


def _signed(number: float | None) -> str:
    return "N/A" if number is None else f"{number:+.2f}"


def _share(share: float | None, found: Delta) -> str:
    return "N/A" if share is None else f"{'-' if found.expected == 'negative' else '+'} {percent(share)}"
