"""What a training run is made of before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from mwjax import data, model
from mwjax.train import evaluation, setup, state, trainable
from mwjax.train.config import RunConfig
from mwjax.train.mesh import make_mesh, share
from mwjax.train.progress import measuring


@dataclass(frozen=True)
class Prepared:
    """digest and description are of the initial weights: ``params``, which are trained, and ``frozen``, whose digest is
    None where all are trained; adapters are not in a digest, they go by their seed. held: the rollouts to evaluate on.
    """

    mesh: Mesh
    shape: model.ModelConfig
    params: Any
    frozen: Any
    digest: str
    frozen_digest: str | None
    description: str
    index: data.Index
    source: data.StepSource
    total: int
    held: evaluation.HeldOut | None


def prepare(config: RunConfig) -> Prepared:
    """Reads weights and rollouts. Raises ValueError for what the user can put right in them."""
    mesh = make_mesh(config.mesh)
    shape, params = setup.decoder(config.model, mesh)
    _, base = model.split_params(params, model.adapter_names(shape))
    digest, description = state.weights_digest(base), setup.describe(config.model, shape, params)
    index = data.scan(config.data.paths, setup.layout(config), vocab_size=shape.vocab_size, progress=measuring)
    source = setup.step_source(config, index, share(mesh))
    total = config.data.steps or source.steps_in(config.data.epochs)
    held = evaluation.scan(config, shape.vocab_size, measuring, share(mesh))
    parts = trainable.split(config.model, shape, params)
    frozen_digest = state.weights_digest(parts.frozen) if parts.frozen else None
    return Prepared(mesh, shape, *parts, digest, frozen_digest, description, index, source, total, held)
