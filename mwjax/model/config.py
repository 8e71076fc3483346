"""What a decoder looks like, read from and written to a Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


class UnsupportedModelError(ValueError):
    """The configuration describes a model this decoder would compute wrongly, or is no usable configuration."""


@dataclasses.dataclass(frozen=True)
class Family:
    """The switches in which the supported families differ, and how Hugging Face names the family."""

    architecture: str
    query_key_norm: bool
    query_key_value_bias: bool
    experts: bool = False


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", query_key_norm=True, query_key_value_bias=False),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", query_key_norm=True, query_key_value_bias=False, experts=True),
    "qwen2": Family("Qwen2ForCausalLM", query_key_norm=False, query_key_value_bias=True),
    "llama": Family("LlamaForCausalLM", query_key_norm=False, query_key_value_bias=False),
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """A change of the rotary frequencies. ``kind`` "linear" uses ``factor`` only; "llama3" uses all four fields
    (Llama 3.1's frequency-dependent scaling)."""

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of SwiGLU blocks in place of the one of every layer: ``count`` of inner width ``width``, of which each
    token goes through ``per_token``. ``normalised``: their weights are scaled to add up to one."""

    count: int
    per_token: int
    width: int
    normalised: bool = True

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "width"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnsupportedModelError(f"experts.{name} must be a positive integer, got {value!r}")
        if self.per_token > self.count:
            raise UnsupportedModelError(f"{self.per_token} experts per token, but there are {self.count}")


LORA_TARGETS = ("query", "key", "value", "output", "gate", "up", "down")
EXPERT_MATRICES = ("gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adapters (Hu et al., arXiv:2106.09685, section 4.1): each target matrix W of every layer acts as
    ``W + alpha / rank * A B`` with A [in, rank] and B [rank, out]. ``targets`` are some of `LORA_TARGETS`."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = LORA_TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UnsupportedModelError(f"the rank of LoRA must be at least 1, got {self.rank}")
        unknown = [name for name in self.targets if name not in LORA_TARGETS]
        if unknown or not self.targets:
            raise UnsupportedModelError(f"targets of LoRA are some of {', '.join(LORA_TARGETS)}; got {self.targets}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder. Hashable, so it can be a static argument of a jitted function.

    ``width`` is the residual stream, ``feed_forward_width`` the inner width of the SwiGLU block; ``heads`` query heads
    share ``key_value_heads`` keys and values in groups of ``heads // key_value_heads``. ``experts`` take the place of
    that block, whose width is then without effect. ``lora`` adds adapters, of which a ``config.json`` says nothing:
    `mwjax.model.merge_adapters` folds them into the weights.
    """

    family: str
    vocab_size: int
    layers: int
    width: int
    feed_forward_width: int
    heads: int
    key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-6
    tied: bool = True
    context_length: int = 32768
    experts: Experts | None = None
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UnsupportedModelError(f"family {self.family!r} is not supported; supported: {', '.join(FAMILIES)}")
        for name in ("vocab_size", "layers", "width", "feed_forward_width", "heads", "key_value_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnsupportedModelError(f"{name} must be a positive integer, got {value!r}")
        if self.heads % self.key_value_heads:
            raise UnsupportedModelError(
                f"heads ({self.heads}) must be a multiple of key_value_heads ({self.key_value_heads})"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if (self.experts is not None) != FAMILIES[self.family].experts:
            needs = "needs" if self.experts is None else "has no"
            raise UnsupportedModelError(f"family {self.family} {needs} experts")
        if self.experts is not None and self.lora is not None:
            wrong = [name for name in self.lora.targets if name in EXPERT_MATRICES]
            if wrong:
                raise UnsupportedModelError(
                    f"adapters of experts are not implemented ({', '.join(wrong)}): choose among the targets "
                    f"{', '.join(name for name in LORA_TARGETS if name not in EXPERT_MATRICES)}"
                )

    @property
    def query_key_norm(self) -> bool:
        return FAMILIES[self.family].query_key_norm

    @property
    def query_key_value_bias(self) -> bool:
        return FAMILIES[self.family].query_key_value_bias

    def axis_sizes(self) -> dict[str, int]:
        """Size of every logical axis a parameter can have."""
        sizes = {
            "layers": self.layers,
            "vocab": self.vocab_size,
            "embed": self.width,
            "heads": self.heads,
            "kv_heads": self.key_value_heads,
            "head_dim": self.head_dim,
        }
        if self.experts is None:
            sizes |= {"mlp": self.feed_forward_width}
        else:
            sizes |= {"experts": self.experts.count, "expert_mlp": self.experts.width}
        return sizes if self.lora is None else {**sizes, "lora": self.lora.rank}

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read the contents of a ``config.json``.

        Raises:
          UnsupportedModelError: unknown architecture, a missing field, or a setting this decoder does not implement;
            all problems found are listed in the one message.
        """
        family = _family(values)
        problems = _unsupported_settings(values)
        theta, scaling = None, None
        try:
            theta, scaling = _read_rope(values)
        except UnsupportedModelError as error:
            problems.append(str(error))
        required = ["vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"]
        if FAMILIES[family].experts:
            # transformers 4 and the published files say num_experts, transformers 5 writes num_local_experts
            values = {**values, "num_experts": _or(values.get("num_experts"), values.get("num_local_experts"))}
            if values.get("num_local_experts") not in (None, values["num_experts"]):
                problems.append("num_experts and num_local_experts disagree")
            required += ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
        for name in required:
            if values.get(name) is None:
                problems.append(f"field {name!r} is missing")
            elif not isinstance(values[name], int) or values[name] < 1:
                problems.append(f"field {name!r} must be a positive integer, got {values[name]!r}")
        if problems:
            raise UnsupportedModelError(f"cannot use this {family} configuration: " + "; ".join(problems))
        heads = values["num_attention_heads"]
        return cls(
            family=family,
            vocab_size=values["vocab_size"],
            layers=values["num_hidden_layers"],
            width=values["hidden_size"],
            feed_forward_width=values["intermediate_size"],
            heads=heads,
            key_value_heads=_or(values.get("num_key_value_heads"), heads),
            head_dim=_or(values.get("head_dim"), values["hidden_size"] // heads),
            rope_theta=float(_or(theta, 10000.0)),  # the default of all families' configuration classes
            rope_scaling=scaling,
            norm_epsilon=float(_or(values.get("rms_norm_eps"), 1e-6)),
            tied=bool(_or(values.get("tie_word_embeddings"), False)),
            context_length=_or(values.get("max_position_embeddings"), 32768),
            experts=_experts(values) if FAMILIES[family].experts else None,
        )

    def to_hf(self) -> dict[str, Any]:
        """The contents of a ``config.json``, readable by transformers 4 (``rope_theta``, ``rope_scaling``) and 5
        (``rope_parameters``)."""
        scaling = None if self.rope_scaling is None else _write_scaling(self.rope_scaling)
        values = {
            "architectures": [FAMILIES[self.family].architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": self.feed_forward_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_theta": self.rope_theta, **(scaling or {"rope_type": "default"})},
            "max_position_embeddings": self.context_length,
            "tie_word_embeddings": self.tied,
            "use_cache": True,
        }
        if self.experts is None:
            return values
        return values | {
            "num_experts": self.experts.count,
            "num_experts_per_tok": self.experts.per_token,
            "moe_intermediate_size": self.experts.width,
            "norm_topk_prob": self.experts.normalised,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


def small_config(
    vocab_size: int,
    layers: int = 2,
    width: int = 64,
    *,
    family: str = "qwen3",
    heads: int = 4,
    key_value_heads: int = 2,
    head_dim: int | None = None,
    feed_forward_width: int | None = None,
    rope_theta: float = 10000.0,
    tied: bool = True,
    context_length: int = 32768,
    experts: Experts | None = None,
) -> ModelConfig:
    """A decoder for tests and small training runs. ``head_dim`` defaults to ``width // heads``, the feed-forward width
    to three times ``width``, ``experts``, where the family has them, to 8 of the feed-forward width over 4, 2 per
    token."""
    inner = 3 * width if feed_forward_width is None else feed_forward_width
    if experts is None and family in FAMILIES and FAMILIES[family].experts:
        experts = Experts(count=8, per_token=2, width=max(inner // 4, 1))
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        layers=layers,
        width=width,
        feed_forward_width=inner,
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=width // heads if head_dim is None else head_dim,
        rope_theta=rope_theta,
        tied=tied,
        context_length=context_length,
        experts=experts,
    )


def _experts(values: Mapping[str, Any]) -> Experts:
    return Experts(
        count=values["num_experts"],
        per_token=values["num_experts_per_tok"],
        width=values["moe_intermediate_size"],
        normalised=bool(_or(values.get("norm_topk_prob"), False)),  # the default of transformers' configuration
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _family(values: Mapping[str, Any]) -> str:
    by_architecture = {family.architecture: name for name, family in FAMILIES.items()}
    named = list(values.get("architectures") or [])
    found = {by_architecture[name] for name in named if name in by_architecture}
    if len(found) == 1 and len(named) == 1:
        return found.pop()
    if not named and values.get("model_type") in FAMILIES:
        return values["model_type"]
    what = f"architectures {named}" if named else f"model_type {values.get('model_type')!r}"
    raise UnsupportedModelError(f"{what} is not supported; supported: {', '.join(by_architecture)}")


def _unsupported_settings(values: Mapping[str, Any]) -> list[str]:
    family = FAMILIES[_family(values)]
    problems = []
    activation = values.get("hidden_act")
    if activation not in (None, "silu", "swish"):
        problems.append(f"hidden_act {activation!r} is not supported (silu is)")
    if values.get("use_sliding_window"):
        problems.append("sliding-window attention (use_sliding_window) is not supported")
    layer_types = set(values.get("layer_types") or ["full_attention"])
    if layer_types != {"full_attention"}:
        problems.append(f"layer_types {sorted(layer_types)} are not supported (full_attention is)")
    # Qwen2 always has its biases, whatever attention_bias says; the others have none here.
    if values.get("attention_bias") and not family.query_key_value_bias:
        problems.append("attention_bias is not supported for this architecture")
    if values.get("mlp_bias"):
        problems.append("mlp_bias is not supported")
    if family.experts and values.get("decoder_sparse_step") not in (None, 1):
        problems.append(f"decoder_sparse_step {values['decoder_sparse_step']} is not supported (1 is)")
    if family.experts and values.get("mlp_only_layers"):
        problems.append(f"mlp_only_layers {values['mlp_only_layers']} are not supported (experts in every layer are)")
    if family.experts and values.get("shared_expert_intermediate_size"):
        problems.append("a shared expert (shared_expert_intermediate_size) is not supported")
    if values.get("quantization_config"):
        problems.append("quantised weights (quantization_config) are not supported: save them in bfloat16 first")
    return problems


def _read_rope(values: Mapping[str, Any]) -> tuple[float | None, RopeScaling | None]:
    """theta and scaling from ``rope_theta`` + ``rope_scaling`` and/or ``rope_parameters``, which must agree."""
    parameters = values.get("rope_parameters") or {}
    thetas = {float(theta) for theta in (values.get("rope_theta"), parameters.get("rope_theta")) if theta is not None}
    if len(thetas) > 1:
        raise UnsupportedModelError(f"rope_theta and rope_parameters disagree on the base: {sorted(thetas)}")
    for fraction in (values.get("partial_rotary_factor"), parameters.get("partial_rotary_factor")):
        if fraction not in (None, 1):
            raise UnsupportedModelError(f"partial_rotary_factor {fraction} is not supported (1 is)")
    old, new = _read_scaling(values.get("rope_scaling")), _read_scaling(parameters)
    if old is not None and values.get("rope_parameters") is not None and old != new:
        raise UnsupportedModelError(f"rope_scaling and rope_parameters disagree: {old} and {new}")
    return (thetas.pop() if thetas else None), old or new


def _read_scaling(values: Mapping[str, Any] | None) -> RopeScaling | None:
    values = values or {}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return None
    try:
        if kind == "linear":
            return RopeScaling("linear", float(values["factor"]))
        if kind == "llama3":
            return RopeScaling(
                "llama3",
                float(values["factor"]),
                float(values["low_freq_factor"]),
                float(values["high_freq_factor"]),
                int(values["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise UnsupportedModelError(f"rope scaling {kind!r} lacks the field {error}") from None
    raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")


def _write_scaling(scaling: RopeScaling) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        values["low_freq_factor"] = scaling.low_frequency_factor
        values["high_freq_factor"] = scaling.high_frequency_factor
        values["original_max_position_embeddings"] = scaling.original_length
    return values
