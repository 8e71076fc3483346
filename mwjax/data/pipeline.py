"""Steps through grain: prefetched, in order, the same for any number of workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

import grain

from mwjax.data.steps import StepBatches, StepSource


def iterate_steps(
    source: StepSource, first_step: int, last_step: int, *, workers: int = 0, prefetch: int = 2
) -> Iterator[StepBatches]:
    """Steps ``first_step`` to ``last_step - 1``. To resume, start at the step a checkpoint names: there is no state.

    workers: processes that build batches beside the training process; 0 builds them in ``prefetch`` threads. Worker
    processes need the usual ``if __name__ == "__main__"`` guard in a script.
    """
    dataset = grain.MapDataset.range(first_step, last_step).map(source.__getitem__)
    if not workers:
        return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)))
    _parse_flags()
    single = dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=prefetch)
    return iter(single.mp_prefetch(options, worker_init_fn=_serve))


def _serve(number: int, workers: int) -> None:
    """In a worker process. Ctrl-C and SIGTERM come to all processes of a job: they are the training process's to act
    on, which still needs batches then. A worker ends when it says so, and when it is gone."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _parse_flags() -> None:
    """Grain's workers read absl flags, which nobody has parsed in a program that is not absl's."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
