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
NAMES = {"audit_your_rollouts": 2, "conditioning_tree": 4, "losses": 4}  # and how many figures each shows
# Runs the code cells in one namespace, as a kernel does, and counts the figures shown. Jupyter is not needed. Training
# loops are cut to two steps: what they print is not looked at here.
RUNNER = """
import ast, json, re, sys
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
        source = re.sub(r"(?m)^(\\w+_STEPS) = \\d+$", r"\\1 = 2", "".join(cell["source"]))
        *body, last = ast.parse(source).body
        value = None
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(body, []), cell["id"], "exec"), names)
            value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), names)
        else:
            exec(compile(ast.Module([*body, last], []), cell["id"], "exec"), names)
        if hasattr(value, "_repr_html_"):
            assert "<svg" in value._repr_html_()
            shown += 1
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
    assert not re.search(r"https?://|index-url|[\w-]+\.(com|org|io|net|ai)\b", text)
    assert not re.search(r"/(work|root|tmp|home|content|Users)/", text)


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
    assert f"figures shown: {NAMES[name]}\n" in done.stdout
