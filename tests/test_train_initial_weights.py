"""Random initial weights and adapters on several meshes: the same to the bit, so that a run may change its mesh."""

from __future__ import annotations

from tests import eight_devices

SCRIPT = """
import jax
from mwjax.train import load, setup, state
from mwjax.train.mesh import make_mesh

model = ["run_dir=r", "data.paths=d", "data.rows_per_microbatch=8", "model.small.vocab_size=96",
         "model.small.layers=2", "model.small.width=32", "model.lora.rank=4"]
meshes = ([], ["mesh.fsdp=2"], ["mesh.tensor=2"], ["mesh.fsdp=4", "mesh.tensor=2"], ["mesh.data=2", "mesh.context=4"])
for sizes in meshes:
    config = load.load(None, [*model, *sizes])
    _, params = setup.decoder(config.model, make_mesh(config.mesh))
    cut = any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(params))
    print(state.weights_digest(jax.device_get(params)), cut)
"""


def test_random_weights_do_not_depend_on_the_mesh() -> None:
    digests, cut = zip(*(line.split() for line in eight_devices.run(SCRIPT).splitlines()))
    assert len(set(digests)) == 1
    assert list(cut) == ["False", "True", "True", "True", "False"]
