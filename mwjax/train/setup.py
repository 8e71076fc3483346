"""From a configuration to what the loop runs on: decoder, data, loss, and what determines the numbers."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mwjax import data, losses, model
from mwjax.losses.advantages import Aggregation
from mwjax.model.attention import backend_for
from mwjax.train import load, trainable
from mwjax.train.config import LossConfig, ModelSection, RunConfig, SmallModel
from mwjax.train.mesh import WHOLE, Share, replicated
from mwjax.train.step import StepConfig, on_mesh, parameter_shardings
from mwjax.tree import EXACT_METHODS, RowShape

# Options that change neither the order of the data nor any number beyond rounding: a run may be continued with others.
# What paths lead to is compared by content.
FREE_ON_RESUME = (
    "run_dir",
    "data.paths",
    "data.workers",
    "data.epochs",
    "data.steps",
    "data.rows_per_microbatch",
    "model.path",
    "model.attention",
    "model.remat",
    "model.sampled_the_data",
    "model.small.tokenizer",
    "loss.vocab_chunk",
    "checkpoint",
    "evaluation",
    "tracking",
    "mesh",
    "log_every",
    "debug",
    "tokenizer",
)
MODEL_CONFIG = "model.config."  # what the keys of config.json begin with in a fingerprint
FROZEN_WEIGHTS = "model (frozen weights)"


def decoder(config: ModelSection, mesh: Mesh | None = None) -> tuple[model.ModelConfig, Any]:
    """The decoder's configuration and its parameters on a mesh (None: on one device), read from its folder or made from
    its seed; adapters joined, and in the types that `trainable.stored` says (float32 where nothing is frozen).

    Raises ValueError where weights are not finite, the mesh does not divide the decoder, and for names in
    ``model.frozen`` that do not exist."""
    shape, params = _base(config, mesh)
    if config.lora is not None:
        shape = dataclasses.replace(shape, lora=_lora(config.lora.model_dump()))
        init = functools.partial(model.init_adapters, shape)
        adapters = _made(init, shape, mesh, config.lora.seed)
        params = model.join_params(params, adapters)
    return shape, trainable.stored(config, shape, params)


def decoder_shape(config: ModelSection, published: Mapping[str, model.ModelConfig] | None = None) -> model.ModelConfig:
    """`decoder`'s configuration alone, adapters included: of the model's folder or hub id only config.json is read.
    published: decoders that are known by ``model.path`` without it. Raises ModelFilesError."""
    if config.path is None:
        assert config.small is not None  # the configuration has one of the two
        shape = _small(config.small)
    elif published is not None and config.path in published:
        shape = published[config.path]
    else:
        with model.local_folder(config.path, weights=False) as folder:
            shape = model.read_config(folder)
    return shape if config.lora is None else dataclasses.replace(shape, lora=_lora(config.lora.model_dump()))


def _lora(values: Mapping[str, Any]) -> model.LoRA:
    return model.LoRA(values["rank"], values["alpha"], tuple(values["targets"]))


def _base(config: ModelSection, mesh: Mesh | None) -> tuple[model.ModelConfig, Any]:
    if config.path is not None:
        # Frozen weights are not widened on the way.
        dtype = jnp.float32 if config.frozen_dtype == "float32" else None
        loaded = model.load(config.path, dtype, shardings=None if mesh is None else functools.partial(_placed, mesh))
        _check_finite(config.path, loaded[1])
        return loaded
    assert config.small is not None  # the configuration has one of the two
    shape = _small(config.small)
    return shape, _made(functools.partial(model.init, shape), shape, mesh, config.small.seed)


def _made(init: Callable[[jax.Array], Any], shape: model.ModelConfig, mesh: Mesh | None, seed: int) -> Any:
    """Random parameters, the same to the bit on any mesh: made whole on every device and then cut (compiled for a part
    of an array, the numbers differ in the last bit, and a run could not be continued on another mesh)."""
    key = jax.random.key(seed)
    if mesh is None:
        return jax.jit(init)(key)
    placed = _placed(mesh, shape, jax.eval_shape(init, key))  # raises before anything is made
    return jax.device_put(jax.jit(init, out_shardings=replicated(mesh))(key), placed)


def _placed(mesh: Mesh, shape: model.ModelConfig, params: Any) -> Any:
    on_mesh(StepConfig(shape), mesh)  # raises where the mesh does not fit
    return parameter_shardings(shape, mesh, params)


def _check_finite(path: str, params: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    bad = [
        jax.tree_util.keystr(key, simple=True, separator=".") for key, leaf in leaves if not jnp.isfinite(leaf).all()
    ]
    if bad:
        raise ValueError(f"model.path: {path}: NaN or infinite weights in {', '.join(bad)}; no run can begin with them")


def _small(config: SmallModel) -> model.ModelConfig:
    vocab_size = config.vocab_size
    if vocab_size is None:
        assert config.tokenizer is not None
        vocab_size = _vocabulary(config.tokenizer)
    inner = config.feed_forward_width or 3 * config.width
    experts = model.Experts(
        config.experts or 8, config.experts_per_token or 2, config.expert_width or max(inner // 4, 1)
    )
    return model.small_config(
        vocab_size,
        config.layers,
        config.width,
        family=config.family,
        heads=config.heads,
        key_value_heads=config.key_value_heads,
        head_dim=config.head_dim,
        feed_forward_width=config.feed_forward_width,
        tied=config.tied,
        experts=experts if config.family == "qwen3_moe" else None,
    )


def _vocabulary(path: str) -> int:
    from tokenizers import Tokenizer

    try:
        return int(Tokenizer.from_file(path).get_vocab_size())
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValueError(f"model.small.tokenizer: {path}: cannot be read as a tokenizer.json: {error}") from error


def resolved(config: RunConfig, platform: str | None = None) -> RunConfig:
    """``config`` with what depends on the devices filled in: ``model.dtype`` and ``model.attention`` are no longer
    auto. platform: a ``jax.Device.platform``; None: of the default devices."""
    platform = platform or jax.default_backend()
    chosen = {}
    if config.model.dtype == "auto":
        chosen["dtype"] = "float32" if platform == "cpu" else "bfloat16"
    if config.model.attention == "auto":
        shape = layout(config).shape
        chosen["attention"] = backend_for(platform, max(shape.length, shape.teacher_length))
    return config.model_copy(update={"model": config.model.model_copy(update=chosen)})


def describe(config: ModelSection, shape: model.ModelConfig, params: Any) -> str:
    """The decoder in words."""
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    origin = config.path if config.small is None else f"random weights, seed {config.small.seed}"
    trained = trainable.describe(config, shape, params)
    met = "" if shape.experts is None else f", {model.active_parameters(shape):,} of them per token"
    described = f"{shape.family}, {shape.layers} layers, width {shape.width}, {count:,} parameters{met} ({origin})"
    return described if trained is None else f"{described}; {trained}"


def method(config: RunConfig) -> str:
    """The method rows are built by. SDCC with lambda 0 is naive_compressed: the teacher is not even built."""
    return "naive_compressed" if config.data.method == "sdcc" and config.loss.sdcc.peak == 0 else config.data.method


def layout(config: RunConfig) -> data.Layout:
    """How the rollouts become rows."""
    settings = config.data
    edges = settings.edges_per_row or settings.row_length
    paired = method(config) == "sdcc"
    shape = RowShape(
        length=settings.row_length,
        edges=edges,
        teacher_length=(settings.teacher_row_length or 2 * settings.row_length) if paired else 0,
        pairs=(settings.pairs_per_row or edges) if paired else 0,
    )
    return data.Layout(
        method=method(config),
        shape=shape,
        rollouts_per_step=settings.rollouts_per_step,
        rows_per_microbatch=settings.rows_per_microbatch,
        group_tries=settings.group_tries,
        # Equal edges can be joined where nothing tells them apart: no ratio, no advantage, no weight of the rollout.
        merge=config.loss.task == "sft" and aggregation(config.loss) in ("token_mean_global", "constant"),
        ratios=config.loss.task != "sft",
        recorded=config.loss.task != "sft" and config.loss.old_logprobs == "recorded",
    )


def aggregation(config: LossConfig) -> Aggregation:
    """How token losses are averaged."""
    if config.aggregation is not None:
        return config.aggregation
    return "token_mean_global" if config.task == "sft" else losses.RECIPES[config.task].aggregation


def step_source(config: RunConfig, index: data.Index, share: Share = WHOLE) -> data.StepSource:
    """Random access to the batches of the run, of each the share of its rows. Raises LossError where rewards, options
    or loss tokens are missing."""
    settings, kind = config.loss, aggregation(config.loss)
    if not index.edges.any():
        raise losses.LossError(
            f"none of the {len(index.ids)} rollouts has a token that gets a loss under {index.layout.method}: no "
            "trainable turn sampled any, or none is left; record trainable turns, or set data.method=packed"
        )
    if kind == "constant" and settings.tokens_per_rollout is None:
        raise losses.LossError("loss.tokens_per_rollout: needed by loss.aggregation constant (dr_grpo); give a number")
    return data.StepSource(
        index,
        seed=config.data.seed,
        advantages=None if settings.task == "sft" else _advantages(settings, index),
        edge_weights=functools.partial(losses.edge_weights, kind=kind, tokens_per_rollout=settings.tokens_per_rollout),
        process=share.part,
        processes=share.parts,
    )


def _advantages(config: LossConfig, index: data.Index) -> np.ndarray:
    kind = config.advantage or losses.RECIPES[config.task].advantage
    advantages = losses.group_advantages(index.rewards, index.groups, kind, ids=index.ids)
    if not advantages.any():
        raise losses.LossError(
            f"all {len(advantages)} advantages are 0: every group holds one rollout or equal rewards, so that "
            f"task {config.task} would learn nothing; record several rollouts per group, or set loss.task=sft"
        )
    return advantages


def loss_config(config: LossConfig) -> losses.LossConfig:
    """The loss as the step takes it: the recipe with the given options in place of its own."""
    others: dict[str, Any] = {"vocab_chunk": config.vocab_chunk, "router_auxiliary": config.router_auxiliary}
    if config.task == "sft":
        return losses.LossConfig("sft", **others)
    given = {
        "clip_low": config.clip_low,
        "clip_high": config.clip_high,
        "kl_coefficient": config.kl,
        "kl_estimator": config.kl_estimator,
        "entropy_coefficient": config.entropy,
        "unit": config.unit,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if config.dual_clip is not None:
        changes["dual_clip"] = None if config.dual_clip == "none" else config.dual_clip
    recipe = losses.RECIPES[config.task].policy_gradient
    return losses.LossConfig("policy_gradient", dataclasses.replace(recipe, **changes), **others)


def compares_with_initial(config: RunConfig) -> bool:
    """Whether the loss needs the weights the run began with: as a reference, or for the old log-probs."""
    return has_reference(config) or (config.loss.task != "sft" and config.loss.old_logprobs != "recorded")


def has_reference(config: RunConfig) -> bool:
    """Whether the loss holds the policy near the weights the run began with."""
    return config.loss.task != "sft" and loss_config(config.loss).policy_gradient.kl_coefficient != 0


def scores_own_rows(config: RunConfig) -> bool:
    """Whether the old log-probs are taken on the step's own rows, under the weights the run began with."""
    if config.loss.task == "sft":
        return False
    old = config.loss.old_logprobs
    return old == "recompute_own_rows" or (old == "recompute" and method(config) in EXACT_METHODS)


def averages_teacher(config: RunConfig) -> bool:
    """Whether SDCC's teacher is a moving average, which the state then holds."""
    return method(config) == "sdcc" and config.loss.sdcc.teacher == "ema"


def step_config(config: RunConfig, shape: model.ModelConfig) -> StepConfig:
    """The static choices of the step. Raises ValueError where the loss is of experts and the decoder has none."""
    if config.loss.router_auxiliary and shape.experts is None:
        raise ValueError("loss.router_auxiliary is of mixtures of experts, and this model is none; remove it")
    return StepConfig(
        model=shape,
        loss=loss_config(config.loss),
        sdcc=method(config) == "sdcc",
        ema_decay=config.loss.sdcc.ema_decay if averages_teacher(config) else None,
        attention=config.model.attention,
        dtype=config.model.dtype,
        remat=config.model.remat,
        scan=not config.debug,
    )


def fingerprint(
    config: RunConfig,
    index: data.Index,
    shape: model.ModelConfig,
    digest: str,
    total: int,
    frozen: str | None = None,
) -> dict[str, Any]:
    """What determines the run's numbers, key by key, in JSON values; options without effect are left out.

    digest: of the initial weights; frozen: of those that are not trained, None where all are.
    """
    values = dict(load.flat(config.model_dump(mode="json")))
    unused = [*FREE_ON_RESUME]
    unused += [] if config.model.lora else ["model.lora"]
    unused += [] if config.loss.router_auxiliary else ["loss.router_auxiliary"]
    small = ("experts", "experts_per_token", "expert_width")
    unused += [] if shape.experts else [f"model.small.{name}" for name in small]
    unused += [] if config.model.frozen else ["model.frozen"]
    unused += [] if config.model.lora or config.model.frozen else ["model.frozen_dtype"]
    unused += [] if averages_teacher(config) else ["loss.sdcc.teacher", "loss.sdcc.ema_decay"]
    kept = {key: value for key, value in values.items() if not any(load.within(key, free) for free in unused)}
    parts = (index.rewards, index.groups, index.edges, index.sampled, index.contents)
    content = zlib.crc32(
        "\n".join(index.ids).encode() + b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
    )
    kept["data (content of the rollouts)"] = f"{len(index.ids)} rollouts, {content:08x}"
    kept |= {MODEL_CONFIG + key: value for key, value in shape.to_hf().items()}
    kept["model (initial weights)"] = digest
    kept |= {} if frozen is None else {FROZEN_WEIGHTS: frozen}
    by_the_total = ["loss.sdcc.ramp"] if method(config) == "sdcc" else []
    by_the_total += ["optimizer.schedule"] if config.optimizer.schedule != "constant" else []
    if by_the_total:
        kept[f"data.steps (all steps: {' and '.join(by_the_total)} go by their number)"] = total
    return kept


def decoder_of(fingerprint: Mapping[str, Any]) -> model.ModelConfig:
    """The decoder's configuration in a `fingerprint`. Raises ValueError where it has none."""
    values = {
        key.removeprefix(MODEL_CONFIG): value for key, value in fingerprint.items() if key.startswith(MODEL_CONFIG)
    }
    if not values:
        raise ValueError("the checkpoint does not say what the model looks like: an older mwjax made it")
    shape = model.ModelConfig.from_hf(values)
    prefix = "model.lora."
    lora = {key.removeprefix(prefix): value for key, value in fingerprint.items() if key.startswith(prefix)}
    return dataclasses.replace(shape, lora=_lora(lora)) if lora else shape
