"""Following the log of every host at once, over connections that may break."""

from __future__ import annotations

import queue
import re
import subprocess
import tempfile
import threading
from dataclasses import dataclass

from mwjax.launch import cloud, commands, remote
from mwjax.launch.job import Host, Machines

_SAID = re.compile(
    re.escape(remote.MARK.encode()) + rb"(?:log (?P<offset>\d+)|end (?P<status>lost|\d+) ?(?P<stopped>stopped)?)\n$"
)


@dataclass(frozen=True)
class Line:
    host: Host
    text: str


@dataclass(frozen=True)
class Ended:
    """The job has ended on a host. status: its exit status, None where it died without one; stopped: it was told to."""

    host: Host
    status: int | None
    stopped: bool


@dataclass(frozen=True)
class Dropped:
    """A connection broke, for the ``times``-th time without a word in between. said: the client's last words."""

    host: Host
    times: int
    said: str


Event = Line | Ended | Dropped


class Streams:
    """The logs of all hosts, as a queue of events; while used as a context manager. Leaving it ends the connections,
    not the job. pause: seconds before a connection that broke is made again, where it had been broken off."""

    def __init__(self, machines: Machines, pause: float) -> None:
        self.machines, self.pause = machines, pause
        self.events: queue.Queue[Event] = queue.Queue()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._threads = [threading.Thread(target=self._follow, args=(host,), daemon=True) for host in machines.hosts]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with self._lock:
            for process in self._running:
                cloud.end(process)
        for thread in self._threads:
            thread.join(5)

    def next(self, timeout: float) -> Event | None:
        """The next event, None if there is none for so long."""
        try:
            return self.events.get(timeout=timeout)
        except queue.Empty:
            return None

    def _follow(self, host: Host) -> None:
        reader, times = LogReader(), 0
        while not self._closing.is_set():
            before = reader.position
            end, said = self._connect(host, reader)
            if end is not None:
                status, stopped = end
                self.events.put(Ended(host, status, stopped))
                return
            times = 1 if reader.position > before else times + 1
            if self._closing.is_set():
                return
            self.events.put(Dropped(host, times, said))
            self._closing.wait(self.pause)

    def _connect(self, host: Host, reader: LogReader) -> tuple[tuple[int | None, bool] | None, str]:
        """One connection: how the job ended, if it did, and the client's last words."""
        command = commands.ssh(self.machines, host, remote.follow(reader.position))
        with tempfile.TemporaryFile() as errors:
            with self._lock:
                if self._closing.is_set():
                    return None, ""
                # A session of its own: Ctrl-C is for us to handle.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                )
                self._running.add(process)
            assert process.stdout is not None
            reader.end = None
            for raw in process.stdout:
                for text in reader.take(raw):
                    self.events.put(Line(host, text))
                if reader.end is not None:
                    break
            if reader.end is not None:
                cloud.end(process)
            process.stdout.close()
            process.wait()
            with self._lock:
                self._running.discard(process)
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
        return reader.end, said[-1] if said else ""


class LogReader:
    """Turns what `remote.follow` prints into lines of the log, each once.

    gcloud connects again by itself when a connection breaks, and runs the same script: the log then comes once more
    from where that script began. ``position`` is how far, in bytes, whole lines have been taken; ``end`` how the job
    ended.
    """

    def __init__(self) -> None:
        self.position = 0
        self.end: tuple[int | None, bool] | None = None
        self._skip = 0

    def take(self, raw: bytes) -> list[str]:
        """The lines in ``raw``, which is one line as it came, or the rest where the connection broke."""
        if not raw.endswith(b"\n"):
            return []  # comes again, whole
        found = _SAID.search(raw)
        if found is None:
            return self._text(raw)
        if found["offset"] is not None:  # what stands before it was broken off
            self._skip = self.position - int(found["offset"])
            return []
        lines = self._text(raw[: found.start()]) if found.start() else []
        status = None if found["status"] == b"lost" else int(found["status"])
        self.end = (status, found["stopped"] is not None)
        return lines

    def _text(self, raw: bytes) -> list[str]:
        if self._skip > 0:
            self._skip -= len(raw)
            return []
        self.position += len(raw)
        # A progress bar draws over itself: its last state is the line.
        return [raw.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]]
