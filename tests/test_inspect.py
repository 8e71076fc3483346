"""``mwjax inspect`` and ``mwjax audit`` as a user runs them."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mwjax import audit, cli, rollouts
from mwjax.audit.audit_page import audit_html
from mwjax.audit.drawing import draw, legend
from mwjax.audit.inspect import lines
from mwjax.audit.terminal import show
from mwjax.audit.text import decoder
from mwjax.rollouts import Edit, Rollout, Turn
from mwjax.tree import build
from tests.random_rollouts import simulate

CASES = Path(__file__).parent / "cases"


def status(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = []
    for name in ("running_example", "side_chains", "no_compression"):
        case = json.loads((CASES / f"{name}.json").read_text())
        made.append(rollouts.from_json({**case["rollouts"][0], "id": name}))
    rollouts.write(tmp_path / "rollouts.jsonl", made)
    return tmp_path / "rollouts.jsonl"


@pytest.fixture
def consistent(tmp_path: Path) -> Path:
    turn = Turn(np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32))
    rollouts.write(tmp_path / "consistent.jsonl", [Rollout("r", (turn,))])
    return tmp_path / "consistent.jsonl"


def add_contradiction(file: Path) -> None:
    rollout = rollouts.read(file).rollouts[0]
    bad = Rollout("bad", rollout.turns, (Edit(1, evicted=((2, 3),)),))
    file.write_text(file.read_text() + json.dumps(rollouts.to_json(bad)) + "\n")


def test_inspect_json_is_the_pinned_format(file, capsys):
    assert status("inspect", file, "--json") == 0
    shown = capsys.readouterr()
    found = [json.loads(line) for line in shown.out.splitlines()]
    for value in found:
        expected = json.loads((CASES / f"{value['id']}.json").read_text())["expect"]["summary"][0]
        assert {**value, "junctions": None} == {**expected, "id": value["id"], "junctions": None}
        assert value["junctions"] == [{**junction, "detail": None} for junction in expected["junctions"]]
    assert len(found) == 3
    assert shown.err == "3 rollouts read, 0 refused\n"


def test_inspect_tokens_follow_their_rollout(file, capsys):
    assert status("inspect", file, "--json", "--tokens", "--id", "running_example") == 0
    first, *tokens = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["id"] == "running_example" and len(tokens) == 13
    assert list(tokens[0]) == ["id", "turn", "index", "token", "trainable", "methods"]
    assert list(tokens[0]["methods"]) == [
        "packed", "logittree", "naive_compressed", "naive_full", "union", "sdcc", "sdcc_teacher",
    ]  # fmt: skip
    assert list(tokens[0]["methods"]["packed"]) == ["prefix_len", "prefix_crc32"]
    assert status("inspect", file, "--tokens") == 2


def test_inspect_refuses_edits_that_contradict_the_turns(file, capsys):
    add_contradiction(file)
    assert status("inspect", file, "--json") == 1
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 3
    assert "3 rollouts read, 1 refused" in shown.err
    assert f"{file}, line 4: edits[0]: contradicts turn 1" in shown.err


def test_inspect_chooses_rollouts(file, capsys):
    assert status("inspect", file, "--json", "--limit", "1") == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == ["running_example"]
    assert status("inspect", file, "--json", "--id", "side_chains", "--id", "nobody") == 1
    shown = capsys.readouterr()
    assert [json.loads(line)["id"] for line in shown.out.splitlines()] == ["side_chains"]
    assert "no usable rollout 'nobody'" in shown.err
    assert status("inspect", file, "--id", "nobody") == 2


def test_nothing_usable_is_status_2(tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n")
    for verb in ("inspect", "audit"):
        assert status(verb, bad) == 2
        assert "0 rollouts read, 1 refused" in capsys.readouterr().err
        assert status(verb, tmp_path / "none.jsonl") == 2
        assert "no such file" in capsys.readouterr().err


def drawn(rollout: Rollout, width: int = 80, encoding: str = "utf-8", decode: bool = False) -> list[str]:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    console = Console(file=out, width=width, highlight=False)
    console.print(legend(console))
    draw(build(rollout), console, decoder(None) if decode else None)
    out.seek(0)
    return out.read().splitlines()


def test_drawing_of_the_running_example():
    case = json.loads((CASES / "running_example.json").read_text())
    lines_ = drawn(rollouts.from_json(case["rollouts"][0]))
    assert [line.rstrip() for line in lines_[4:]] == [
        "  0 ░░░█████▓▓                                 3       7       6       2  0",
        "           │ turn 1: deletion at 7, 1 out",
        "  1        ▒▒█▓▓                               9       3       2       2  1",
        "             │ turn 2: deletion at 9, 1 out",
        "  2          ▒▒█▓                             11       2       1       1  2",
        "               │ turn 3: deletion at 11, 1 out",
        "  3            ▒█                             12       1       1       0  3",
    ]


def test_drawing_shows_texts_and_other_chains():
    case = json.loads((CASES / "side_chains.json").read_text())
    text = "\n".join(drawn(rollouts.from_json(case["rollouts"][0]), decode=True))
    assert "turn 0, title, not trainable: [871 400 528]" in text
    assert "turn 3, summarise: [142 24 82" in text
    assert re.search(r"│ - \[832 28 266", text) and re.search(r"│ \+ \[142 24 82", text)
    assert re.search(r"^compaction", text, re.MULTILINE)


def test_drawing_says_what_edits_did():
    first = Turn(np.arange(1, 9, dtype=np.int32), np.array([9], np.int32))
    second = Turn(np.array([1, 2, 7, 8, 9], np.int32), np.array([10], np.int32))
    third = Turn(np.arange(1, 11, dtype=np.int32), np.array([11], np.int32))
    edits = (rollouts.Edit(1, evicted=((2, 6),)), rollouts.Edit(2, restored=((2, 6),)))
    text = "\n".join(drawn(Rollout("r", (first, second, third), edits)))
    assert "turn 1: pruned tool result at 2, 4 out" in text
    assert "turn 2: restored at 2" in text


@given(st.integers(0, 10**6), st.sampled_from([60, 80, 130]), st.booleans())
def test_drawings_fit_any_width_and_encoding(seed, width, decode):
    rollout = simulate(seed, turns=12).rollout
    for encoding in ("utf-8", "ascii"):
        text = drawn(rollout, width, encoding, decode)
        assert max(map(len, text)) <= width and not any("\\" in line for line in text)


def test_a_terminal_without_unicode_shows_everything_escaped(tmp_path):
    turn = Turn(np.array([1], np.int32), np.array([2], np.int32))
    rollouts.write(tmp_path / "r.jsonl", [Rollout("naïve", (turn,)), Rollout("x", (turn, turn))])
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    for arguments in (["inspect", tmp_path / "r.jsonl"], ["audit", tmp_path / "r.jsonl"]):
        command = [sys.executable, "-m", "mwjax", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert (done.returncode, done.stderr) == (0, "2 rollouts read, 0 refused\n")
        assert "na\\xefve" in done.stdout or arguments[0] == "audit"


def test_audit_prints_the_verdict_and_writes_both_files(file, tmp_path, capsys):
    page, figures = tmp_path / "report.html", tmp_path / "audit.json"
    assert status("audit", file, "--html", page, "--json", figures) == 0
    shown = capsys.readouterr()
    assert "of the loss tokens would be trained under a context the model never saw" in " ".join(shown.out.split())
    assert all(len(line) <= 80 for line in shown.out.splitlines())
    assert shown.err == "3 rollouts read, 0 refused\n"
    value = json.loads(figures.read_text())
    result = audit.run(file)
    assert value == json.loads(json.dumps(audit.to_json(result)))
    assert value["methods"][2]["method"] == "naive_compressed" and value["methods"][2]["wrong"] == 15
    assert page.read_text() == audit_html(result)
    assert status("audit", file, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out) == value


def test_strict(file, consistent, tmp_path, capsys):
    assert status("audit", file, "--strict") == 1
    assert "--strict" in capsys.readouterr().err
    assert status("audit", consistent, "--strict") == 0
    rows = tmp_path / "rows.jsonl"
    good = {"rollout_id": "r", "input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 1, 1]}
    rows.write_text(json.dumps(good) + "\n")
    assert status("audit", consistent, "--rows", rows, "--strict") == 0
    assert "every loss token is trained under exactly the context" in " ".join(capsys.readouterr().out.split())
    rows.write_text(json.dumps({**good, "input_ids": [1, 9, 3, 4, 5]}) + "\n")
    assert status("audit", consistent, "--rows", rows) == 0
    shown = capsys.readouterr().out
    assert "line 1, position 3: token [4] and 1 more, rollout 'r'" in shown
    assert re.search(r"sampled under +\[2 3\]", shown) and re.search(r"trained under +\[9 3\]", shown)
    assert status("audit", consistent, "--rows", rows, "--strict", "--html", tmp_path / "r.html") == 1
    assert "First mismatches" in (tmp_path / "r.html").read_text()


def test_refused_rows_are_counted_on_stderr(consistent, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    good = {"rollout_id": "r", "input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 0, 1]}
    rows.write_text(json.dumps(good) + "\n" + json.dumps({**good, "rollout_id": "x"}) + "\n")
    assert status("audit", consistent, "--rows", rows) == 1
    assert "1 training row read, 1 refused" in capsys.readouterr().err
    rows.write_text("{}\n")
    assert status("audit", consistent, "--rows", rows) == 2
    assert "line 1: rollout_id: missing" in capsys.readouterr().err


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value[:1] != "#"]
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing(file):
    text = audit_html(audit.run(file))
    page = Page(text)
    assert page.open == [] and page.fetched == []
    assert not {"script", "link", "img"} & set(page.seen) and "@import" not in text
    assert page.seen.count("figure") == page.seen.count("figcaption") == 3
    assert "naive_compressed" in text and text == audit_html(audit.run(file))
    hostile = Turn(np.array([1], np.int32), np.array([2], np.int32))
    refused = audit.run([Rollout("<script>", (hostile,)), Rollout("<script>", (hostile,))])
    assert "<script>" not in audit_html(refused) and "&lt;script&gt;" in audit_html(refused)


def test_neither_verb_imports_jax(file, tmp_path):
    code = (
        "import sys; from mwjax import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as stop: print('status', stop.code, 'jax' in sys.modules, file=sys.stderr)"
    )
    for arguments in (["inspect", file], ["audit", file, "--html", tmp_path / "x.html"]):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.stderr.splitlines()[-1] in ("status 0 False", "status None False")


def test_lines_are_plain_json_values():
    for line in lines(build(simulate(3).rollout), tokens=True):
        json.dumps(line, allow_nan=False)


def test_names_cannot_command_the_terminal():
    case = json.loads((CASES / "running_example.json").read_text())
    tree = build(rollouts.from_json({**case["rollouts"][0], "id": "\x1b[2J\nr", "group": "g"}))
    console = Console(file=io.StringIO(), width=80, highlight=False)
    draw(tree, console)
    assert console.file.getvalue().startswith("?[2J?r  group g  reward 1\n")  # type: ignore[attr-defined]
    show(audit.run([tree.rollout]), console)
    assert "  ?[2J?r  5 of 10 loss tokens" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_audit_reads_a_pipe_whole(file):
    command = [sys.executable, "-m", "mwjax", "audit", "/dev/stdin"]
    done = subprocess.run(command, input=file.read_bytes(), capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"3 rollouts read, 0 refused\n")
