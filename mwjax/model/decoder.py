"""Pure functions of a parameter pytree: initialise it, describe it, run the decoder on packed rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from mwjax.model.attention import attend as attend_tree
from mwjax.model.attention.blockwise import LOG_SUM_EXP_NAME, OUTPUT_NAME
from mwjax.model.attention.sharded import on_mesh
from mwjax.model.config import ModelConfig
from mwjax.model.embedding import look_up
from mwjax.model.experts import Routing
from mwjax.model.layers import Decoder, Layer
from mwjax.model.parameters import initialise, is_declaration, join_params
from mwjax.model.rope import rotations
from mwjax.model.sharding import FSDP, HIDDEN, constrain, gather, spec

Params = dict[str, Any]
REMAT = ("none", "attention", "full")


def init(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters: a nested dict of arrays of ``dtype``, those of the layers stacked on axis 0.

    Pure, so it can be jitted with ``config`` and ``dtype`` static and output shardings.
    """
    if config.lora is not None:
        base = init(dataclasses.replace(config, lora=None), key, dtype)
        return join_params(base, init_adapters(config, jax.random.fold_in(key, 1), dtype))
    return _random(declarations(config), config, key, dtype)


def init_adapters(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Adapters that leave the decoder as it is (A random, B zero), to be joined with its parameters (`join_params`)."""
    return _random(_structure(config)[3], config, key, dtype)


def _random(declared: Params, config: ModelConfig, key: jax.Array, dtype: Any) -> Params:
    outer_key, layers_key = jax.random.split(key)
    sizes = config.axis_sizes()
    outer = dict(declared)
    layer = outer.pop("layers")
    layers = jax.lax.map(
        lambda layer_key: initialise(layer, sizes, layer_key, dtype), jax.random.split(layers_key, config.layers)
    )
    return {**initialise(outer, sizes, outer_key, dtype), "layers": layers}


def adapter_names(config: ModelConfig) -> list[str]:
    """Dotted names of the parameters that are adapters; none without ``config.lora``."""
    return list(flatten_dict(_structure(config)[3], sep="."))


def abstract_params(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """`init`'s result as `jax.ShapeDtypeStruct`, computing nothing."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), _structure(config)[1])


def active_parameters(config: ModelConfig) -> int:
    """How many parameters a token meets: all, but for the experts it does not choose."""
    sizes = config.axis_sizes()
    if config.experts is not None:
        sizes["experts"] = config.experts.per_token

    def met(axes: tuple[str, ...]) -> int:
        # Every expert has a column in the router.
        return math.prod((sizes if "expert_mlp" in axes else config.axis_sizes())[axis] for axis in axes)

    return sum(map(met, jax.tree.leaves(logical_axes(config), is_leaf=_is_names)))


def declarations(config: ModelConfig) -> Params:
    """`init`'s result with the `Declaration` of every parameter, which is about one layer, unstacked."""
    return _structure(config)[2]


def logical_axes(config: ModelConfig) -> Params:
    """`init`'s result with every array's logical axis names, for example ("layers", "embed", "heads", "head_dim")."""
    axes = jax.tree.map(lambda leaf: leaf.axes, declarations(config), is_leaf=is_declaration)
    axes["layers"] = jax.tree.map(lambda names: ("layers", *names), axes["layers"], is_leaf=_is_names)
    return axes


def _is_names(leaf: Any) -> bool:
    return isinstance(leaf, tuple)


@lru_cache(maxsize=64)
def _structure(config: ModelConfig) -> tuple[Any, Params, Params, Params]:
    """(graph definition, abstract parameters, declarations, declarations of the adapters among them), from the one,
    abstract construction of the modules."""
    abstract = nnx.eval_shape(lambda: Decoder(config))
    definition, state = nnx.split(abstract)
    declared = jax.tree.map(
        lambda variable: variable.declaration, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    adapters = jax.tree.map(
        lambda variable: variable.declaration,
        nnx.filter_state(state, nnx.LoRAParam),
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    return definition, nnx.to_pure_dict(state), nnx.to_pure_dict(declared), nnx.to_pure_dict(adapters)


def unembedding(params: Params, config: ModelConfig) -> jax.Array:
    """The output matrix [V, D]: logits are ``hidden @ unembedding.T``."""
    return params["embedding"] if config.tied else params["unembedding"]


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    visible_until: jax.Array,
    *,
    attention: str | Callable[..., jax.Array] = "blockwise",
    dtype: Any = jnp.float32,
    remat: str = "none",
    scan: bool = True,
    index: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Hidden states after the final norm.

    Args:
      params, config: as from `init` or `load`.
      tokens, positions, visible_until: int32 [B, T] as in `mwjax.tree.rows.Rows`.
      attention: a backend of `mwjax.model.attention.attend`, or a function
        ``(query, key, value, visible_until) -> mixed`` in its place (for instance the same under `jax.shard_map`).
      dtype: of the activations; norms, rotations and softmax are float32, or float64 with float64.
      remat: what the backward pass keeps of each layer: "none" rematerialised, "attention" (the layer's input, the
        attention output and its log-sum-exp) or "full" (the layer's input only).
      scan: False runs the layers in a Python loop, for debugging (works under `jax.disable_jit`).
      index: int32 [B, T] as `mwjax.tree.Rows.index`, for rows reordered for context parallelism.
      mesh: the mesh (all axes of `mwjax.model.sharding`) that rows and parameters are spread over; None: one device.

    Returns:
      [B, T, width] of ``dtype``.

    Raises:
      ValueError: unknown attention backend or remat.
    """
    return forward_routed(
        params,
        config,
        tokens,
        positions,
        visible_until,
        None,
        attention=attention,
        dtype=dtype,
        remat=remat,
        scan=scan,
        index=index,
        mesh=mesh,
    )[0]


def forward_routed(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    visible_until: jax.Array,
    weight: jax.Array | None,
    *,
    attention: str | Callable[..., jax.Array] = "blockwise",
    dtype: Any = jnp.float32,
    remat: str = "none",
    scan: bool = True,
    index: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Routing | None]:
    """As `forward`, with what the routers of a mixture of experts did beside it: sums [layers, experts] in which a
    token counts as ``weight`` [B, T] says (`mwjax.tree.Rows.token_weight`). None without ``weight``, and for a decoder
    without experts."""
    if isinstance(attention, str):
        attention = partial(attend_tree, backend=attention) if mesh is None else on_mesh(attention, mesh)
    mix, order = attention, () if index is None else (index,)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, *_: Any) -> tuple[jax.Array, None]:
        return mix(query, key, value, visible_until, *order), None

    hidden, _, routing = run_layers(
        params,
        config,
        tokens,
        positions,
        attend,
        None,
        dtype=dtype,
        remat=remat,
        scan=scan,
        mesh=mesh,
        weight=weight,
    )
    return hidden, routing


def run_layers(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any]],
    state: Any,
    *,
    dtype: Any,
    remat: str = "none",
    scan: bool = True,
    mesh: Mesh | None = None,
    weight: jax.Array | None = None,
) -> tuple[jax.Array, Any, Routing | None]:
    """Embed, run every layer, norm: (hidden states, state, `Routing` of every layer or None, see `forward_routed`).
    ``attend(query, key, value, state, layer)`` returns the mixed values and the new state, a pytree that is handed
    from layer to layer."""
    decoder: Decoder = nnx.merge(_structure(config)[0], params)
    layer_definition, layer_params = nnx.split(decoder.layers)
    angles = rotations(config, positions, jnp.promote_types(dtype, jnp.float32))

    def run_layer(carry: tuple[jax.Array, Any], inputs: tuple[Any, jax.Array]) -> tuple[tuple[jax.Array, Any], Any]:
        (x, state), (params, number) = carry, inputs
        layer: Layer = nnx.merge(layer_definition, _gathered(params, config, x.dtype, mesh))
        x, state, routing = layer(
            x, angles, lambda query, key, value: attend(query, key, value, state, number), weight, mesh
        )
        return (constrain(x, HIDDEN, mesh), state), routing

    step = _rematerialise(run_layer, remat, _splits_weights(mesh))
    inputs = (nnx.to_pure_dict(layer_params), jnp.arange(config.layers, dtype=jnp.int32))
    carry = (look_up(decoder.embedding[...], tokens, dtype, mesh), state)
    if scan:
        carry, routing = jax.lax.scan(step, carry, inputs)
    else:
        by_layer = []
        for number in range(config.layers):
            carry, one = step(carry, jax.tree.map(lambda leaf, number=number: leaf[number], inputs))
            by_layer.append(one)
        routing = jax.tree.map(lambda *leaves: jnp.stack(leaves), *by_layer)
    return decoder.norm(carry[0]), carry[1], routing


def _gathered(params: Params, config: ModelConfig, dtype: Any, mesh: Mesh | None) -> Params:
    """A layer's parameters, of which the matrices that ``fsdp`` splits are whole along it, in ``dtype``. (Experts take
    theirs in `mwjax.model.experts`.) Left to itself, XLA takes a product apart into as many as there are devices, to
    multiply with one part while the next is under way, and moves the partial sums through main memory each time."""
    if mesh is None or not _splits_weights(mesh):
        return params
    axes = jax.tree.map(lambda leaf: leaf.axes, declarations(config)["layers"], is_leaf=is_declaration)

    def whole(array: jax.Array, names: tuple[str, ...]) -> jax.Array:
        partition = spec(names)
        if len(names) == 1 or FSDP not in partition or "experts" in names:
            return array
        return gather(array.astype(dtype), partition, mesh)

    return jax.tree.map(whole, params, axes)


def _splits_weights(mesh: Mesh | None) -> bool:
    return mesh is not None and mesh.shape[FSDP] > 1


def _rematerialise(run_layer: Callable[..., Any], remat: str, gathers: bool) -> Callable[..., Any]:
    if remat not in REMAT:
        raise ValueError(f"unknown remat {remat!r}; available: {', '.join(REMAT)}")
    if remat == "none" and not gathers:
        return run_layer
    names = (OUTPUT_NAME, LOG_SUM_EXP_NAME) if remat == "attention" else ()
    policy = _but_layouts if remat == "none" else jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint(run_layer, policy=policy, prevent_cse=False)


def _but_layouts(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether the backward pass keeps what a primitive computes: all but arrays laid out anew, since the gathered
    weights of all layers would be the whole model on every device."""
    return primitive.name != "sharding_constraint"
