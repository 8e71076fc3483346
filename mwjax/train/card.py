"""``card.md``: what a reader needs to know before interpreting the run's figures."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath

import mwjax
from mwjax.data import Index
from mwjax.train import whole_file
from mwjax.train.config import RunConfig

FILE = "card.md"
LOOKED_AT = 64
NOT_SAMPLED_HERE = (
    "N/A: the model's weights are not declared to be those that sampled the rollouts (model.sampled_the_data)"
)


def write(
    config: RunConfig,
    index: Index,
    description: str,
    digest: str,
    total: int,
    rows: Sequence[dict[str, Any]],
    evaluations: Sequence[dict[str, Any]] = (),
) -> None:
    """Writes the card of a run from its configuration, its data and the rows of ``metrics.jsonl`` and
    ``evaluation.jsonl`` so far.

    description: the decoder in words; digest: of its initial weights; total: the run's number of steps.
    """
    lines = [
        ("data", f"{', '.join(config.data.paths)}: {len(index.ids)} rollouts used, {len(index.refused)} refused"),
        ("harness", harness(index)),
        ("method", config.data.method),
        ("task", config.loss.task),
        ("lambda", _lambda(config)),
        ("old log-probs", "not used" if config.loss.task == "sft" else config.loss.old_logprobs),
        ("model", f"{description}, weights {digest}"),
        ("activations", f"{config.model.dtype}; trained parameters, norms, softmax and losses float32"),
        ("logdiff", logdiff(config, rows)),
        ("held out", held_out(evaluations)),
        ("steps", f"{rows[-1]['step'] if rows else 0} of {total}"),
        ("versions", versions()),
    ]
    text = f"# {epath.Path(config.run_dir).name}\n\n" + "".join(f"- **{name}**: {value}\n" for name, value in lines)
    whole_file.write(epath.Path(config.run_dir) / FILE, text)


def harness(index: Index) -> str:
    """The harnesses the rollouts name in ``meta.harness``, and whether they recorded their edits."""
    rollouts = [index.sources[file][place] for file, place in index.lines[:LOOKED_AT]]
    named = sorted({str(rollout.meta["harness"]) for rollout in rollouts if "harness" in rollout.meta})
    edited = sum(bool(rollout.edits) for rollout in rollouts)
    kind = f"white box ({edited} rollouts with recorded edits)" if edited else "black box (no recorded edits)"
    looked = f", of the first {LOOKED_AT} rollouts" if len(index.ids) > LOOKED_AT else ""
    return f"{', '.join(named) or 'not named in the rollouts'}; {kind}{looked}"


def logdiff(config: RunConfig, rows: Sequence[dict[str, Any]]) -> str:
    """logdiff of the first step, when the weights still are those that sampled."""
    if not config.model.sampled_the_data:
        return NOT_SAMPLED_HERE
    first = next((row for row in rows if row["step"] == 1 and row.get("logdiff_mean") is not None), None)
    if first is None:
        return "N/A: no recorded log-probs in the first step"
    mean, largest = first["logdiff_mean"], first["logdiff_max_token"]
    return (
        f"mean {mean:.4g}, token maximum {largest:.4g} in the first step, by the weights that sampled; later steps "
        "contain what was learnt"
    )


def held_out(evaluations: Sequence[dict[str, Any]]) -> str:
    """The loss on held-out rollouts before training, and newest."""
    if not evaluations:
        return "not evaluated"
    shown = dict.fromkeys((0, len(evaluations) - 1))
    figures = [f"{evaluations[number]['loss']:.4f} at step {evaluations[number]['step']}" for number in shown]
    newest = evaluations[-1]
    return (
        f"{', '.join(figures)}: mean negative log-likelihood in nats of {newest['tokens']} sampled tokens of "
        f"{newest['rollouts']} rollouts ({newest['refused']} refused), under the contexts they were sampled under"
    )


def versions() -> str:
    """Of everything that can change a number."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    found = [f"{name} {importlib.metadata.version(name)}" for name in names]
    device = jax.devices()[0].device_kind
    return f"mwjax {mwjax.__version__}, Python {platform.python_version()}, {', '.join(found)}, on {device}"


def _lambda(config: RunConfig) -> str:
    if config.data.method != "sdcc":
        return "not used"
    if config.loss.sdcc.peak == 0:
        return "0: trained exactly as naive_compressed"
    return f"{config.loss.sdcc.peak} after a linear ramp over {config.loss.sdcc.ramp:.0%} of the steps"
