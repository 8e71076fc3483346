"""Plays a harness once for all tests of a file, and imports what was recorded."""

import pytest

from tests.harnesses.checks import Play, imported
from tests.harnesses.play import missing, played


@pytest.fixture(scope="module")
def play(request, tmp_path_factory) -> Play:
    """Of the harness that the parameter names, or else the module's HARNESS."""
    name = getattr(request, "param", None) or request.module.HARNESS
    reason = missing(name)
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp(name)
    played(name, folder)
    return imported(folder)
