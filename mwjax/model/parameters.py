"""The one declaration of a parameter: shape, logical axes, initialiser and Hugging Face name in a single call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from mwjax.model.config import ModelConfig


class Declaration(NamedTuple):
    """How a parameter is laid out here and in a Hugging Face file. All of it is about one layer, unstacked.

    ``file_axes`` are the axes of the tensor in the file, each a group of our axes merged in that order: a query
    projection here ("embed", "heads", "head_dim") is (("heads", "head_dim"), ("embed",)) there. A first axis that is
    not among them is one of many tensors in the file: ``{}`` in ``file_name`` stands for its number.
    """

    axes: tuple[str, ...]
    file_axes: tuple[tuple[str, ...], ...]
    file_name: str
    initialiser: str

    def adapters(self) -> tuple[Declaration, Declaration]:
        """Of the factors A and B of a low-rank adapter of this matrix, whose first axes are those it sums over. The
        names are PEFT's."""
        inner = tuple(self.initialiser.split())
        outer_group, inner_group = self.file_axes
        name = self.file_name.removesuffix("weight") + "lora_{}.weight"
        return (
            Declaration((*inner, "lora"), (("lora",), inner_group), name.format("A"), self.initialiser),
            Declaration(("lora", *self.axes[len(inner) :]), (outer_group, ("lora",)), name.format("B"), "zeros"),
        )

    @property
    def axes_in_file(self) -> tuple[str, ...]:
        """Our axes without the one that numbers tensors."""
        return self.axes[len(self.axes) - len(self._order()) :]

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(sizes[axis] for axis in self.axes)

    def file_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(int(np.prod([sizes[axis] for axis in group])) for group in self.file_axes)

    def to_file(self, array: np.ndarray) -> np.ndarray:
        sizes = dict(zip(self.axes_in_file, array.shape))
        return array.transpose(self._order()).reshape(self.file_shape(sizes))

    def from_file(self, array: np.ndarray, sizes: dict[str, int]) -> np.ndarray:
        order = self._order()
        return array.reshape([sizes[self.axes_in_file[i]] for i in order]).transpose(np.argsort(order))

    def _order(self) -> list[int]:
        names = [axis for group in self.file_axes for axis in group]
        kept = [axis for axis in self.axes if axis in names]
        return [kept.index(axis) for axis in names]


def is_declaration(leaf: Any) -> bool:
    return isinstance(leaf, Declaration)


def parameter(config: ModelConfig, axes: str, file_name: str, file_axes: str, initialiser: str) -> nnx.Param:
    """Declare a parameter. Its value is zeros: `initialise` and `mwjax.model.load` make the real ones.

    Args:
      config: sizes the axes.
      axes: logical axis names, "embed heads head_dim".
      file_name: name in a Hugging Face checkpoint, relative to the layer for parameters of a layer.
      file_axes: the same axes as the file orders and merges them, "heads+head_dim embed".
      initialiser: "ones", "zeros", or the axes summed over when the parameter is applied ("embed"): normal with
        variance one over their size.
    """
    groups = tuple(tuple(group.split("+")) for group in file_axes.split())
    declaration = Declaration(tuple(axes.split()), groups, file_name, initialiser)
    return nnx.Param(jnp.zeros(declaration.shape(config.axis_sizes())), declaration=declaration)


def initialise(declarations: Any, sizes: dict[str, int], key: jax.Array, dtype: Any) -> Any:
    """Random values for a pytree of declarations. One draw is cut into all of them: compiling the generator once per
    parameter takes seconds."""
    leaves, structure = jax.tree.flatten(declarations, is_leaf=is_declaration)
    random = [leaf.initialiser not in ("ones", "zeros") for leaf in leaves]
    counts = [int(np.prod(leaf.shape(sizes))) if drawn else 0 for leaf, drawn in zip(leaves, random)]
    numbers = jnp.split(jax.random.normal(key, (sum(counts),), dtype), np.cumsum(counts)[:-1])
    values = []
    for leaf, drawn, part in zip(leaves, random, numbers):
        if drawn:
            scale = float(np.prod([sizes[axis] for axis in leaf.initialiser.split()])) ** -0.5
            values.append(scale * part.reshape(leaf.shape(sizes)))
        else:
            values.append(jnp.full(leaf.shape(sizes), float(leaf.initialiser == "ones"), dtype))
    return jax.tree.unflatten(structure, values)


def split_params(params: Any, names: Collection[str]) -> tuple[Any, Any]:
    """Two nested dicts: the leaves of these dotted names ("layers.attention.query"), and the others."""
    chosen: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, leaf in flatten_dict(params, sep=".").items():
        (chosen if name in names else others)[name] = leaf
    return unflatten_dict(chosen, sep="."), unflatten_dict(others, sep=".")


def join_params(some: Any, others: Any) -> Any:
    """Undoes `split_params`."""
    return unflatten_dict({**flatten_dict(some), **flatten_dict(others)})
