"""What the processes of a run tell each other on the host: values of all, of process 0, and whether they are alike."""

from __future__ import annotations

import itertools
import json
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from etils import epath

from mwjax.train.check_in import ProcessesError, ranges

SHARED = 30.0  # seconds in which a new file is seen on all hosts
LOOK = 0.2  # seconds between looks for it
LISTEN = 500  # milliseconds

_rounds = itertools.count()


def gathered(value: Any) -> list[Any]:
    """A JSON value of every process, by number. All must ask, as often as each other and in the same order."""
    import jax

    if jax.process_count() == 1:
        return [value]
    client, place = store(), f"mwjax/{next(_rounds)}"
    client.key_value_set(f"{place}/{jax.process_index()}", json.dumps(value))
    return [_awaited(f"{place}/{process}") for process in range(jax.process_count())]


def of_leader(value: Any) -> Any:
    """Process 0's JSON value. All must ask, as often as each other and in the same order."""
    import jax

    if jax.process_count() == 1:
        return value
    client, place = store(), f"mwjax/{next(_rounds)}"
    if jax.process_index() == 0:
        client.key_value_set(place, json.dumps(value))
    return _awaited(place)


def _awaited(place: str) -> Any:
    """A JSON value from the store, which may come hours later; a process that is lost is noticed elsewhere
    (`mwjax.train.ending`). Waits a little at a time: in between, Python takes signals."""
    import jax

    while True:
        try:
            return json.loads(store().blocking_key_value_get(place, LISTEN))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def differing(some: Mapping[str, Any], where: str, others: Mapping[str, Any], elsewhere: str) -> list[str]:
    """A line for every key on which two mappings differ, with both values and where each stands."""
    missing = object()
    return [
        f"  {key}: {some.get(key, 'not set')!r} {where}, {others.get(key, 'not set')!r} {elsewhere}"
        for key in sorted({*some, *others})
        if some.get(key, missing) != others.get(key, missing)
    ]


def check_alike(values: Mapping[str, Any], what: str) -> None:
    """Raises ProcessesError where some JSON values are not those of process 0, which would train something else."""
    import jax

    lines = differing(of_leader(values), "in process 0", json.loads(json.dumps(values)), "here")
    if lines:
        raise ProcessesError(
            f"process {jax.process_index()} ({socket.gethostname()}) has {what} that process 0 has not:\n"
            + "\n".join(lines)
            + "\nStart the same command, with the same files, on all hosts."
        )


def check_shared(folder: epath.PathLike) -> None:
    """Raises ProcessesError where a folder is not one and the same on all hosts."""
    import jax

    if jax.process_count() == 1:
        return
    mark = epath.Path(folder) / f".shared-{of_leader(secrets.token_hex(8))}"
    if jax.process_index() == 0:
        mark.touch()
    gathered("written")
    deadline = time.monotonic() + SHARED
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(LOOK)
    blind = [process for process, sees in enumerate(gathered(seen)) if not sees]
    if jax.process_index() == 0:
        mark.unlink()
    if blind:
        raise ProcessesError(
            f"run_dir: {folder}: what process 0 writes there is not seen by process {ranges(blind)}: give a folder "
            "that all hosts share, such as gs://BUCKET/RUN or one on a network file system"
        )


def store() -> Any:
    """The key-value store of jax's coordinator."""
    from jax._src import distributed

    return distributed.global_state.client
