"""The same gradient step here and in torch + transformers on this CPU: same trees, same weights, same loss.

    python tests/benchmarks/torch_peer.py [--view 2048] [--rounds 3]       needs ".[parity]" (Python 3.11)

Two trees: one session with four junctions ("pop" of step_time.py), and a group of 8 rollouts that share a prompt of
three quarters of a view. In transformers (Qwen3, float32, attention by torch's fused sdpa kernel):

- "row per view": every context is a causal row, one after another or as a padded batch, whichever is faster here
- "4D mask": the tree as one row under a dense float mask, the general way transformers offers
- "segments": the tree as one row, each unbranched stretch attending to the keys of its path, gathered. That is how TRL
  1.16's experimental async GRPO packs rollouts into a tree, on a FlashAttention-3 kernel for GPUs; here sdpa runs it.
  No other released trainer that we know of packs trees.

All score the same sampled tokens: hidden states are gathered at their parents before the unembedding. Numerators and
embedding gradients must agree before anything is timed. "work" is multiply-adds relative to `packed`: linear layers
on tokens, attention on visible pairs, unembedding on sampled tokens, padding not counted. Both sides get the same
cores; rounds are interleaved and medians taken. Times of step_time.py differ where its sampled tokens do.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
import transformers
from step_time import VOCABULARY, rows, session

from mwjax import losses, model
from mwjax.rollouts import Rollout, Turn
from mwjax.train.step import StepConfig, gradient_sums
from mwjax.tree import Batch

SEGMENTS = "segments"
Result = tuple[float, np.ndarray]  # the loss's numerator, the gradient of the embedding


class Row(NamedTuple):
    """One row without padding, in torch: tokens, positions int64 [1, T]; parent, target int64 [E]; weight [E]."""

    tokens: torch.Tensor
    positions: torch.Tensor
    parent: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor


def group(view: int, count: int, rng: np.random.Generator) -> list[Rollout]:
    """Rollouts of one turn each that share three quarters of a view as their prompt."""
    prompt = rng.integers(0, VOCABULARY, view * 3 // 4).astype(np.int32)
    completions = rng.integers(0, VOCABULARY, (count, view - len(prompt))).astype(np.int32)
    return [Rollout(f"{number}", (Turn(prompt, ids),)) for number, ids in enumerate(completions)]


def torch_rows(batch: Batch) -> list[Row]:
    """The rows of a batch, cut to what its edges read."""
    made = []
    for tokens, positions, parent, target, weight in zip(
        batch.rows.tokens,
        batch.rows.positions,
        batch.rows.edges.parent,
        batch.rows.edges.target,
        batch.rows.edges.weight,
    ):
        used = weight > 0
        length = int(parent[used].max()) + 1
        wide = [torch.from_numpy(part.astype(np.int64)) for part in (tokens[:length], positions[:length])]
        read = [torch.from_numpy(part[used].astype(np.int64)) for part in (parent, target)]
        made.append(Row(wide[0][None], wide[1][None], *read, torch.from_numpy(weight[used])))
    return made


def segments(visible_until: np.ndarray) -> list[tuple[int, int, torch.Tensor]]:
    """(first row, end, path [P]) of every unbranched stretch of a tree; the path holds the rows a key may have."""
    found = []
    ancestors: list[tuple[int, int, int]] = []  # (first, end, end of the subtree) of the stretches above
    start, length = 0, len(visible_until)
    while start < length:
        end = start + 1
        while end < length and visible_until[end] == visible_until[end - 1]:
            end += 1
        while ancestors and ancestors[-1][2] <= start:
            ancestors.pop()
        ancestors.append((start, end, int(visible_until[start])))
        found.append((start, end, torch.cat([torch.arange(first, last) for first, last, _ in ancestors])))
        start = end
    return found


def segment_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree: list[tuple[int, int, torch.Tensor, torch.Tensor | None]],
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers over `segments`: query [1, Hq, T, D], key and value [1, Hkv, T, D]."""
    repeats = query.shape[1] // key.shape[1]
    parts = []
    for start, end, path, mask in tree:
        keys, values = (x.index_select(2, path).repeat_interleave(repeats, 1) for x in (key, value))
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, start:end], keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling
            )
        )
    return torch.cat(parts, 2).transpose(1, 2), None


def masked(tree: list[tuple[int, int, torch.Tensor]]) -> list[tuple[int, int, torch.Tensor, torch.Tensor | None]]:
    """Each segment with its mask: none where it begins a tree, so that plain causal attention does."""
    made = []
    for start, end, path in tree:
        size, mask = end - start, None
        if len(path) != size:
            mask = torch.full((size, len(path)), float("-inf")).triu(len(path) - size + 1)
        made.append((start, end, path, mask))
    return made


def score(decoder: Any, row: Row, **options: Any) -> torch.Tensor:
    """The loss's numerator of one row: minus the sum of weighted log-probs."""
    hidden = decoder.model(row.tokens, position_ids=row.positions, use_cache=False, **options).last_hidden_state
    logits = decoder.lm_head(hidden[0, row.parent])
    return (torch.nn.functional.cross_entropy(logits, row.target, reduction="none") * row.weight).sum()


def one_by_one(decoder: Any, made: list[Row]) -> float:
    total = 0.0
    for row in made:
        loss = score(decoder, row)
        loss.backward()
        total += loss.item()
    return total


def padded(decoder: Any, made: list[Row]) -> float:
    """All rows at once, padded at the right, where causal attention needs no mask."""
    length = max(row.tokens.shape[1] for row in made)
    tokens = torch.cat([torch.nn.functional.pad(row.tokens, (0, length - row.tokens.shape[1])) for row in made])
    parent = torch.cat([row.parent + number * length for number, row in enumerate(made)])
    hidden = decoder.model(tokens, use_cache=False).last_hidden_state
    logits = decoder.lm_head(hidden.flatten(0, 1)[parent])
    target, weight = (torch.cat([getattr(row, name) for row in made]) for name in ("target", "weight"))
    loss = (torch.nn.functional.cross_entropy(logits, target, reduction="none") * weight).sum()
    loss.backward()
    return loss.item()


def one_row(decoder: Any, row: Row, kind: str, options: dict[str, Any]) -> float:
    decoder.set_attn_implementation(kind)
    loss = score(decoder, row, **options)
    loss.backward()
    decoder.set_attn_implementation("sdpa")
    return loss.item()


def theirs(decoder: Any, call: Callable[[Any], float]) -> Callable[[], Result]:
    def run() -> Result:
        decoder.zero_grad(set_to_none=True)
        return call(decoder), decoder.model.embed_tokens.weight.grad.numpy()

    return run


def ours(params: Any, shape: model.ModelConfig, batch: Batch) -> Callable[[], Result]:
    step = jax.jit(functools.partial(gradient_sums, config=StepConfig(shape, losses.LossConfig("sft"))))
    compiled = step.lower(params, batch).compile()

    def run() -> Result:
        total = jax.block_until_ready(compiled(params, batch))
        return float(total.numerator), np.asarray(total.gradients["embedding"])

    return run


def steps(decoder: Any, params: Any, shape: model.ModelConfig, rollouts: list[Rollout]) -> dict[str, Any]:
    """By name: a function that computes one gradient of these rollouts."""
    tree, views = rows(rollouts, "packed"), rows(rollouts, "logittree")
    [whole], single = torch_rows(tree), torch_rows(views)
    length = whole.tokens.shape[1]
    until, index = tree.rows.visible_until[0, :length], np.arange(length)
    visible = torch.from_numpy((index[None] <= index[:, None]) & (index[:, None] < until[None]))
    mask = torch.zeros(length, length).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    stretches = {"tree": masked(segments(until))}
    by_rows = {}
    for how in (one_by_one, padded):
        run = theirs(decoder, functools.partial(how, made=single))
        run()
        start = time.perf_counter()
        run()
        by_rows[time.perf_counter() - start] = how.__name__.replace("_", " "), run
    name, fastest = by_rows[min(by_rows)]
    as_one_row = functools.partial(one_row, row=whole)
    return {
        "mwjax packed": ours(params, shape, tree),
        "mwjax logittree": ours(params, shape, views),
        f"torch, row per view ({name})": fastest,
        "torch, 4D mask": theirs(decoder, functools.partial(as_one_row, kind="sdpa", options={"attention_mask": mask})),
        "torch, segments": theirs(decoder, functools.partial(as_one_row, kind=SEGMENTS, options=stretches)),
    }


def work(shape: model.ModelConfig, batch: Batch) -> tuple[int, int, float]:
    """Tokens, visible pairs and multiply-adds of a forward pass, padding not counted."""
    made = torch_rows(batch)
    tokens = pairs = edges = 0
    for number, row in enumerate(made):
        length = row.tokens.shape[1]
        tokens += length
        pairs += int((np.minimum(batch.rows.visible_until[number, :length], length) - np.arange(length)).sum())
        edges += len(row.target)
    heads = shape.heads * shape.head_dim
    linear = shape.width * (2 * heads + 2 * shape.key_value_heads * shape.head_dim + 3 * shape.feed_forward_width)
    return tokens, pairs, shape.layers * (tokens * linear + pairs * 2 * heads) + edges * shape.width * shape.vocab_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--view", type=int, default=2048, help="tokens of a view")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--threads", type=int, default=2, help="cores for either side")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])  # XLA takes as many threads as cores
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    transformers.AttentionInterface.register(SEGMENTS, segment_attention)
    transformers.AttentionMaskInterface.register(SEGMENTS, lambda **_: None)

    shape = model.small_config(VOCABULARY, options.layers, options.width, heads=6, key_value_heads=2)
    decoder = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**shape.to_hf()), attn_implementation="sdpa", dtype=torch.float32
    )
    with tempfile.TemporaryDirectory() as folder:
        decoder.save_pretrained(folder)
        loaded, params = model.load(folder)
    assert loaded == shape, (loaded, shape)

    rng = np.random.default_rng(0)
    trees = {"session": [session("pop", options.view, rng)], "group of 8": group(options.view, 8, rng)}
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, jax {jax.__version__}", end=", ")
    print(f"{options.layers} layers, width {options.width}, float32, {options.threads} threads, views {options.view}\n")
    print("| tree | step | tokens | pairs | work | s | x packed |\n|---|---|---|---|---|---|---|")
    for name, rollouts in trees.items():
        run = steps(decoder, params, shape, rollouts)
        expected = run["mwjax packed"]()
        for step, call in run.items():
            loss, gradient = call()
            apart = np.abs(gradient - expected[1]).max() / np.abs(expected[1]).max()
            if abs(loss / expected[0] - 1) > 1e-5 or apart > 1e-4:
                raise SystemExit(
                    f"{name}, {step}: not the same work: loss {loss} / {expected[0]}, gradient {apart:.1e}"
                )
        seconds: dict[str, list[float]] = {step: [] for step in run}
        for _ in range(options.rounds):
            for step, call in run.items():
                start = time.perf_counter()
                call()
                seconds[step].append(time.perf_counter() - start)
        median = {step: float(np.median(values)) for step, values in seconds.items()}
        sizes = {method: work(shape, rows(rollouts, method)) for method in ("packed", "logittree")}
        for step, at in median.items():
            method = "logittree" if "logittree" in step or "view" in step else "packed"
            tokens, pairs, adds = sizes[method]
            print(
                f"| {name} | {step} | {tokens:,} | {pairs / 1e6:.1f}M | {adds / sizes['packed'][2]:.2f} "
                f"| {at:.2f} | {at / median['mwjax packed']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
