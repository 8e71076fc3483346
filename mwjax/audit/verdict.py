"""An audit in plain words: what the figures mean for training, what to do, and what else to be wary of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mwjax.audit.result import MethodAudit


def percent(share: float | None, digits: int = 1) -> str:
    """A share as text; never a rounded 0 % or 100 % where it is not exactly that."""
    if share is None:
        return "N/A"
    least = 10.0**-digits
    if 0 < 100 * share < least:
        return f"<{least:g} %"
    if 0 < 100 * (1 - share) < least:
        return f">{100 - least:g} %"
    return f"{100 * share:.{digits}f} %"


def judge(methods: Mapping[str, MethodAudit], forks: int, side_chains: int) -> tuple[bool, str, str]:
    """(consistent, verdict, advice) from what every method would train."""
    packed, compressed, full = methods["packed"], methods["naive_compressed"], methods["naive_full"]
    if not packed.loss_tokens:
        return (
            False,
            "There is no loss token: no trainable turn sampled anything.",
            "Check `trainable` and `completion_ids`.",
        )
    if not (compressed.wrong or full.wrong or compressed.lost or full.lost):
        return True, *_consistent(forks)
    cost = ""
    separate = methods["logittree"].row_tokens
    if separate > packed.row_tokens:
        cost = f" ({packed.row_tokens:,} tokens, against {separate:,} for one sequence per branch view)"
    exact = f"Train with `packed`: every sampled token under its own context, in one pass{cost}."
    if not compressed.wrong:
        clean = "The last context alone (naive_compressed) trains nothing under a context the model never saw"
        if compressed.lost:
            where = "contexts that were edited away" + (" or in side chains" if side_chains else "")
            clean += (
                f", but loses {percent(compressed.lost / packed.loss_tokens)} of the loss tokens: they are in {where}"
            )
        if full.wrong:
            clean += f"; naive_full would do so for {percent(full.wrong_share)} of them{_sizes(full)}"
        return False, clean + ".", exact
    parts = [
        f"{percent(compressed.wrong_share)} of the loss tokens would be trained under a context the model never saw by "
        f"naive_compressed{_sizes(compressed)}"
    ]
    if full.wrong:
        parts.append(f"{percent(full.wrong_share)} by naive_full{_sizes(full)}")
    if compressed.lost:
        parts.append(f"and naive_compressed loses {percent(compressed.lost / packed.loss_tokens)} of them altogether")
    return False, ", ".join(parts) + ".", exact


def _consistent(forks: int) -> tuple[str, str]:
    if not forks:
        verdict = (
            "Consistent: no context was edited. Every method trains every token under the context it was sampled under."
        )
    else:
        verdict = "Consistent: contexts branch, but no loss token ends up under another context with any method."
    return verdict, "Plain sequences (naive_compressed) will do, and are the cheapest."


def _sizes(method: MethodAudit) -> str:
    sizes = []
    if method.missing_mean:
        sizes.append(f"{method.missing_mean:,.0f} tokens missing on average")
    if method.extra_mean:
        sizes.append(f"{method.extra_mean:,.0f} too many")
    return f" ({', '.join(sizes)})" if sizes else ""


def warnings(
    sampling: Mapping[str, int],
    *,
    sampled: int,
    without_logprobs: int,
    truncated_turns: int,
    turns: int,
    untrainable: int,
    without_loss: Sequence[str],
    without_main: Sequence[str],
) -> tuple[str, ...]:
    """What to be wary of beside the contexts."""
    found = []
    if count := sampling.get("truncated_processed", 0):
        found.append(
            f"{count:,} tokens have processed log-probs under top-p < 1 or top-k > 0: the recorded distribution was "
            "renormalised over the kept tokens, so ratios against it are biased. Record raw log-probs, or sample with "
            "top_p 1 and top_k 0."
        )
    if count := sampling.get("greedy_processed", 0):
        found.append(
            f"{count:,} tokens have processed log-probs at temperature 0: greedy decoding has no log-prob to form a "
            "ratio with. Record raw log-probs, or use these tokens for SFT only."
        )
    if count := sampling.get("raw_other_temperature", 0):
        found.append(
            f"{count:,} tokens were sampled at a temperature other than 1 and have raw log-probs: ratios compare the "
            "model at temperature 1, which is not the distribution these tokens came from."
        )
    if without_logprobs:
        found.append(
            f"{without_logprobs:,} of {sampled:,} sampled tokens have no recorded log-probs: no logdiff and no ratio "
            "against the engine for them; SFT works, and old log-probs can be recomputed on the exact views."
        )
    if truncated_turns:
        found.append(
            f"{truncated_turns:,} of {turns:,} completions ended by length: they were cut off, so their reward may not "
            "be theirs."
        )
    if untrainable * 2 > sampled:
        found.append(f"{percent(untrainable / sampled)} of the sampled tokens are in turns marked not trainable.")
    if without_loss:
        found.append(f"{_listed(without_loss)} no loss token.")
    if without_main:
        found.append(
            f"{_listed(without_main)} no turn on chain 'main', so naive_*, union and sdcc train nothing there."
        )
    return tuple(found)


def _listed(ids: Sequence[str]) -> str:
    names = ", ".join(map(repr, ids[:3])) + (", ..." if len(ids) > 3 else "")
    return f"{len(ids):,} rollout{' has' if len(ids) == 1 else 's have'} ({names})"


def judge_rows(
    *,
    loss_tokens: int,
    exact: int,
    wrong_prefix: int,
    not_sampled: int,
    untrainable: int,
    without_context: int,
    position_gaps: int,
    surplus: int,
    never: int,
) -> tuple[str, str]:
    """(verdict, advice) on a user's own training rows."""
    if not loss_tokens:
        return (
            "These rows train nothing: no loss_mask entry is set.",
            "Set loss_mask to 1 where a sampled token stands.",
        )
    parts, advice = [], []
    if wrong_prefix:
        parts.append(
            f"{percent(wrong_prefix / loss_tokens)} of the loss tokens are trained under a context the model never saw"
        )
        advice.append(
            "build the rows from the views each token was sampled in (`packed` or `logittree`), or mask those tokens"
        )
    if not_sampled or without_context:
        count = not_sampled + without_context
        parts.append(f"{percent(count / loss_tokens)} are not tokens the policy sampled")
        advice.append("set loss_mask to 0 on prompts, tool results and inserted text")
    if untrainable:
        parts.append(f"{percent(untrainable / loss_tokens)} belong to turns marked not trainable")
        advice.append("mask turns that are not trainable")
    if position_gaps:
        parts.append(f"{percent(position_gaps / loss_tokens)} see position ids with gaps or not from 0")
        advice.append("number the visible tokens of each segment 0, 1, 2, ...")
    if not parts:
        parts.append("Consistent: every loss token is trained under exactly the context it was sampled under")
    if surplus:
        parts.append(f"sampled tokens are counted {surplus:,} times too often")
        advice.append("leave each sampled token unmasked in exactly one row")
    if never:
        parts.append(f"{never:,} trainable sampled tokens are never trained")
        advice.append("add the rows of the views they are in, or accept the loss knowingly")
    text = "; ".join(advice)
    return "; ".join(parts) + ".", (text[:1].upper() + text[1:] + ".") if text else "Nothing to do."
