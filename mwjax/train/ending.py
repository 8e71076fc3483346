"""That the processes of a run end together.

The connections by which they checked in stay open: a process that fails says why, one that is killed is noticed at once
(the system closes its connection), and the others, which would wait for it in a collective, end with a message.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from mwjax.train.check_in import Peer, Processes
from mwjax.train.stop import StoppedEarly

NOTICED = 1.0  # seconds in which a closed connection is seen
LINGER = 5.0  # seconds that process 0 waits for the others to end
FAILED, LOST = 70, 75  # exit status: a defect; another process was lost, and the same command goes on


@contextlib.contextmanager
def ending_together(processes: Processes) -> Iterator[None]:
    """For as long as the context lasts, an error of one process, or its death, ends all of them.

    A process that leaves with an exception tells it to the others; they print it and exit at once, wherever they wait,
    with status 2 for what the user can put right (ValueError, OSError), 130 after a second Ctrl-C, 143 after a SIGTERM
    before training began, else 70. Where a process is gone without a word (killed, or its machine is), the others exit
    with status 75.
    """
    listening = _Listening(processes)
    try:
        yield
    except BaseException as error:
        listening.failed(error)
        raise
    listening.done()


class _Listening:
    """A thread for every connection, which waits for the end of the other side."""

    def __init__(self, processes: Processes) -> None:
        self.processes, self.leaving = processes, threading.Lock()
        self.threads = [threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in processes.peers]
        for thread in self.threads:
            thread.start()

    def done(self) -> None:
        """This process has come to a good end."""
        for peer in self.processes.peers:
            peer.say(done=True)

    def failed(self, error: BaseException) -> None:
        """This process is about to leave with an error."""
        time.sleep(NOTICED)  # it may come from another's death: then this process ends with that
        self.leaving.acquire()  # from here on the end of the others is no news
        words = str(error).strip() or type(error).__name__
        status = _status(error)
        self._tell(f"process {self.processes.process} ({socket.gethostname()}) failed: {words}", status)
        # Before jax's own hook, and before Python waits for threads: either would wait for processes that are gone.
        atexit.register(self._exit, status)
        threading.Thread(target=self._exit_after_main, args=(status,), daemon=True).start()

    def _listen(self, peer: Peer) -> None:
        done = False
        while (said := peer.hear()) is not None and said.get("done"):
            done = True
        if said is None and done:
            return
        if said is None:
            said = {
                "end": f"process {peer.process} ({peer.name}) is gone without a word: killed, or its machine is. All "
                "processes end; look at its log. The same command on all of them goes on from the last checkpoint",
                "status": LOST,
            }
        if self.leaving.acquire(blocking=False):
            self._tell(said["end"], said["status"])
            print(f"mwjax: {said['end']}", file=sys.stderr, flush=True)
            self._exit(said["status"])

    def _tell(self, end: str, status: int) -> None:
        for peer in self.processes.peers:
            peer.say(end=end, status=status)

    def _exit_after_main(self, status: int) -> NoReturn:
        threading.main_thread().join()
        self._exit(status)

    def _exit(self, status: int) -> NoReturn:
        if self.processes.process == 0:  # jax's coordinator: the others abort once it is gone
            deadline = time.monotonic() + LINGER
            for thread in self.threads:
                if thread is not threading.current_thread():
                    thread.join(max(0.0, deadline - time.monotonic()))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status(error: BaseException) -> int:
    """The exit status of a process that leaves with an error."""
    if isinstance(error, StoppedEarly):
        return error.status
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, ValueError | OSError) else FAILED
