"""The notebooks: clean files, and every code cell runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
NAMES = ("conditioning_tree",)
# Runs the code cells in one namespace, as a kernel does, and counts the figures shown. Jupyter is not needed.
RUNNER = """
import json, sys
import matplotlib.pyplot as plt
shown = 0
def show():
    global shown
    shown += len(plt.get_fignums())
    plt.close("all")
plt.show = show
names = {"__name__": "__main__"}
for cell in json.loads(open(sys.argv[1], encoding="utf-8").read())["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
print("figures shown:", shown)
"""


def read(name: str) -> dict:
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))


def code_cells(name: str) -> list[str]:
    return ["".join(cell["source"]) for cell in read(name)["cells"] if cell["cell_type"] == "code"]


def test_these_are_all():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_is_a_valid_clean_notebook(name):
    notebook = read(name)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", one) for one in ids)
    for cell in notebook["cells"]:
        expected = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            expected |= {"execution_count", "outputs"}
            assert cell["outputs"] == [] and cell["execution_count"] is None
            compile("".join(cell["source"]), cell["id"], "exec")
        else:
            assert cell["cell_type"] == "markdown"
        assert set(cell) == expected
        assert all(line.endswith("\n") for line in cell["source"][:-1])


@pytest.mark.parametrize("name", NAMES)
def test_names_no_host_and_no_path_of_a_machine(name):
    text = (NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
    assert not re.search(r"https?://|/work/|/root/|/tmp/|/home/|/content/|index-url|[\w-]+\.(com|org|io|net|ai)\b", text)


def test_all_install_in_the_same_way():
    first = {code_cells(name)[0] for name in NAMES}
    assert len(first) == 1
    assert "MWJAX_SOURCE" in first.pop()


@pytest.mark.parametrize("name", NAMES)
def test_runs(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", RUNNER, NOTEBOOKS / f"{name}.ipynb"],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "Agg", "JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"figures shown: [1-9]", done.stdout)
