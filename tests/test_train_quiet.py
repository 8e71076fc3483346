from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mwjax.train.quiet import quiet

# The audit event falls between the moment a thread looks the hook up and the moment it calls it.
HOOK_IN_FLIGHT = """
import sys, threading
from mwjax.train.quiet import quiet

looked_up, left, told = threading.Event(), threading.Event(), []

def audit(name, arguments):
    if name == "sys.unraisablehook":
        looked_up.set()
        assert left.wait(60)

class Fails:
    def __del__(self):
        raise ValueError("on deletion")

sys.addaudithook(audit)
sys.unraisablehook = lambda event: told.append(str(event.exc_value))
with quiet():
    thread = threading.Thread(target=lambda: Fails() and None)
    thread.start()
    assert looked_up.wait(60)
left.set()
thread.join()
print(told)
"""


def test_a_thread_may_call_the_hook_while_another_puts_the_earlier_one_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOOK_IN_FLIGHT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "['on deletion']\n"), done.stderr


def unraisable(error: Exception, thing: Any = None) -> Any:
    return SimpleNamespace(exc_value=error, object=thing)


def coroutine(filename: str) -> Any:
    return SimpleNamespace(cr_code=SimpleNamespace(co_filename=filename))


def test_only_what_orbax_gives_up_is_kept_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    level = logging.getLogger("absl").level
    others = [
        unraisable(RuntimeError("Event loop is closed"), coroutine("/site-packages/aiohttp/client.py")),
        unraisable(ValueError("another"), None),
        unraisable(ValueError("another"), coroutine("/site-packages/aiohttp/client.py")),
    ]
    with quiet():
        with quiet():
            sys.unraisablehook(unraisable(RuntimeError("Event loop is closed")))
            sys.unraisablehook(unraisable(ValueError("torn"), coroutine("/site-packages/orbax/checkpoint/x.py")))
            for event in others:
                sys.unraisablehook(event)
        assert logging.getLogger("absl").level == logging.CRITICAL
        assert sys.unraisablehook != told.append
    assert told == others
    assert (sys.unraisablehook, logging.getLogger("absl").level) == (told.append, level)
