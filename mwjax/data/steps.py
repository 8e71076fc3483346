"""(seed, epoch, global step) -> the fixed-shape micro-batches of one optimiser step: pure, so any worker can do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mwjax.data.index import Index
from mwjax.tree import Batch, collate, pack

# (rollout of every edge [N], group of every rollout [R]) -> (weight of every edge [N], denominator)
EdgeWeights = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, float]]


@dataclass(frozen=True, eq=False)
class StepBatches:
    """One optimiser step. microbatches: this process's rows, as batches of one shape. denominator: what the summed
    loss of all micro-batches of all processes is divided by. numbers: of the step's rollouts, in the index. The rest
    are counts over all processes."""

    step: int
    epoch: int
    microbatches: tuple[Batch, ...]
    denominator: float
    numbers: np.ndarray
    loss_tokens: int
    sampled_tokens: int
    rows: int
    row_tokens: int
    view_tokens: int
    trie_tokens: int


def plan_epoch(index: Index, seed: int, epoch: int) -> list[np.ndarray]:
    """The units of every step of an epoch: a seeded shuffle, cut where a step is full; the last has the rest."""
    order = np.random.default_rng((seed, epoch)).permutation(len(index.units))
    steps: list[list[int]] = [[]]
    held = 0
    for unit in order.tolist():
        size = len(index.units[unit])
        if held and held + size > index.layout.rollouts_per_step:
            steps.append([])
            held = 0
        steps[-1].append(unit)
        held += size
    return [np.array(units) for units in steps]


class StepSource:
    """Random access to the steps of a run, over as many epochs as it takes.

    advantages: float [R], one per rollout of the index. edge_weights: the aggregation (see :data:`EdgeWeights`).
    process, processes: which rows of a micro-batch this process makes; ``rows_per_microbatch`` must divide evenly.
    """

    def __init__(
        self,
        index: Index,
        *,
        seed: int = 0,
        advantages: np.ndarray | None = None,
        edge_weights: EdgeWeights | None = None,
        process: int = 0,
        processes: int = 1,
    ):
        rows = index.layout.rows_per_microbatch
        if rows % processes:
            raise ValueError(f"rows_per_microbatch ({rows}) must be a multiple of the {processes} processes")
        self.index, self.seed = index, seed
        self.advantages = np.zeros(len(index.ids)) if advantages is None else np.asarray(advantages)
        self.edge_weights = edge_weights
        self.process, self.processes = process, processes
        self._plans: dict[int, list[np.ndarray]] = {}

    def steps_in(self, epochs: int) -> int:
        """Number of steps of the first ``epochs`` epochs."""
        return sum(len(self._plan(epoch)) for epoch in range(epochs))

    def _plan(self, epoch: int) -> list[np.ndarray]:
        # Several threads ask at once: whoever is first or last, an epoch's entry is the same.
        if epoch not in self._plans:
            self._plans[epoch] = plan_epoch(self.index, self.seed, epoch)
        return self._plans[epoch]

    def __getitem__(self, step: int) -> StepBatches:
        if step < 0:
            raise IndexError(f"step {step}: steps count from 0")
        epoch, place = 0, step
        while place >= len(self._plan(epoch)):
            place -= len(self._plan(epoch))
            epoch += 1
        return self.batches(self._plan(epoch)[place], step, epoch)

    def batches(self, units: np.ndarray, step: int = 0, epoch: int = 0) -> StepBatches:
        """Some units of the index as one step, which is called ``step`` and ``epoch``."""
        index, layout = self.index, self.index.layout
        owner = np.concatenate([np.full(len(index.needs[unit]), unit) for unit in units])
        needs = np.concatenate([index.needs[unit] for unit in units])
        rows = pack([tuple(need) for need in needs.tolist()], layout.shape)
        per_pass = layout.rows_per_microbatch
        share = per_pass // self.processes
        passes = max(-(-len(rows) // per_pass), 1)
        mine = [rows[start : start + share] for start in range(self.process * share, passes * per_pass, per_pass)]
        first = np.concatenate([[0], np.cumsum([len(index.needs[unit]) for unit in units])])
        wanted = {int(owner[fragment]) for some in mine for row in some for fragment in row}
        made = {
            int(first[place]) + number: fragment
            for place, unit in enumerate(units.tolist())
            if unit in wanted
            for number, fragment in enumerate(index.unit_fragments(unit))
        }
        numbers = np.concatenate([index.units[unit] for unit in units])
        weight, denominator = self._weights(numbers)
        batches = []
        for some in mine:
            places = {fragment: place for place, fragment in enumerate(f for row in some for f in row)}
            batch = collate(
                [made[fragment] for fragment in places],
                [[places[fragment] for fragment in row] for row in some],
                layout.shape,
                share,
            )
            edges = batch.rows.edges
            edges.advantage[:] = self.advantages[edges.rollout] * (edges.weight > 0)
            edges.weight[:] *= weight[edges.rollout]
            batches.append(batch)
        return StepBatches(
            step=step,
            epoch=epoch,
            microbatches=tuple(batches),
            denominator=denominator,
            numbers=numbers,
            loss_tokens=int(index.edges[numbers].sum()),
            sampled_tokens=int(index.sampled[numbers].sum()),
            rows=len(rows),
            row_tokens=int(needs[:, 0].sum()),
            view_tokens=int(index.view_tokens[units].sum()),
            trie_tokens=int(index.trie_tokens[units].sum()),
        )

    def _weights(self, numbers: np.ndarray) -> tuple[np.ndarray, float]:
        """Weight of an edge of every rollout of the index, and the denominator, from the whole step's counts."""
        weight = np.ones(len(self.index.ids), np.float64)
        counts = self.index.edges[numbers]
        if self.edge_weights is None:
            return weight, float(counts.sum())
        local = np.repeat(np.arange(len(numbers)), counts)
        per_edge, denominator = self.edge_weights(local, self.index.groups[numbers])
        weight[numbers[local]] = per_edge
        return weight, denominator
