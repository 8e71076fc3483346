"""The one declaration of a parameter: shape, logical axes, initialiser and Hugging Face name in a single call."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mwjax.model.config import ModelConfig


class Declaration(NamedTuple):
    """How a parameter is laid out here and in a Hugging Face file. All of it is about one layer, unstacked.

    ``file_axes`` are the axes of the tensor in the file, each a group of our axes merged in that order: a query
    projection here ("embed", "heads", "head_dim") is (("heads", "head_dim"), ("embed",)) there.
    """

    axes: tuple[str, ...]
    file_axes: tuple[tuple[str, ...], ...]
    file_name: str

    def file_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(int(np.prod([sizes[axis] for axis in group])) for group in self.file_axes)

    def to_file(self, array: np.ndarray) -> np.ndarray:
        sizes = dict(zip(self.axes, array.shape))
        return array.transpose(self._order()).reshape(self.file_shape(sizes))

    def from_file(self, array: np.ndarray, sizes: dict[str, int]) -> np.ndarray:
        order = self._order()
        return array.reshape([sizes[self.axes[i]] for i in order]).transpose(np.argsort(order))

    def _order(self) -> list[int]:
        return [self.axes.index(axis) for group in self.file_axes for axis in group]


class ParameterSource(NamedTuple):
    """What a module needs to create its parameters."""

    config: ModelConfig
    rngs: nnx.Rngs
    dtype: Any


def parameter(source: ParameterSource, axes: str, file_name: str, file_axes: str, initialiser: str) -> nnx.Param:
    """Declare and initialise one parameter.

    Args:
      source: configuration (which sizes the axes), random keys, dtype.
      axes: logical axis names, "embed heads head_dim".
      file_name: name in a Hugging Face checkpoint, relative to the layer for parameters of a layer.
      file_axes: the same axes as the file orders and merges them, "heads+head_dim embed".
      initialiser: "ones", "zeros", or the axes summed over when the parameter is applied ("embed"): normal with
        variance one over their size.
    """
    declaration = Declaration(
        tuple(axes.split()), tuple(tuple(group.split("+")) for group in file_axes.split()), file_name
    )
    sizes = source.config.axis_sizes()
    shape = tuple(sizes[axis] for axis in declaration.axes)
    if initialiser == "ones":
        value = jnp.ones(shape, source.dtype)
    elif initialiser == "zeros":
        value = jnp.zeros(shape, source.dtype)
    else:
        scale = float(np.prod([sizes[axis] for axis in initialiser.split()])) ** -0.5
        value = scale * jax.random.normal(source.rngs.params(), shape, source.dtype)
    return nnx.Param(value, declaration=declaration)
