"""README's table of plans: the commands of its rows, what they say, and the table: ``python -m
tests.benchmarks.plan_table --help``.

Needs libtpu (extra "tpu"), no TPU; two to five minutes of CPU a row. What a row said is kept in --out and not computed
again by a later run, so that a run may be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from mwjax.train import load, whole_file

ROWS = [
    f"configs/{config}.yaml --topology {topology} --microbatches 1 model.path=Qwen/{model} {' '.join(options)}"
    for config, topology, model, *options in [
        ("grpo", "v5litepod-16", "Qwen3-4B", "data.rows_per_microbatch=16", "mesh.fsdp=16"),
        ("grpo", "v6e-16", "Qwen3-4B", "data.rows_per_microbatch=16", "mesh.fsdp=16"),
        ("grpo", "v5p-32", "Qwen3-4B", "data.row_length=32768", "data.rows_per_microbatch=16", "mesh.fsdp=16"),
        ("sft", "v5p-64", "Qwen3-8B", "data.row_length=32768", "data.rows_per_microbatch=32", "mesh.fsdp=32"),
        ("sft", "v5p-256", "Qwen3-32B", "data.row_length=32768", "data.rows_per_microbatch=128", "mesh.fsdp=128"),
        ("sft", "v6e-64", "Qwen3-30B-A3B", "data.row_length=8192", "data.rows_per_microbatch=64", "mesh.fsdp=64"),
        (
            *("sft", "v5p-32", "Qwen3-4B"),
            *("data.row_length=131072", "data.rows_per_microbatch=4", "mesh.fsdp=4", "mesh.context=4"),
        ),
        ("sdcc", "v5p-64", "Qwen3-8B", "loss.task=sft", "data.rows_per_microbatch=32", "mesh.fsdp=32"),
        (
            *("sft", "v5litepod-16", "Qwen3-4B"),
            *("data.method=logittree", "data.row_length=8192", "data.rows_per_microbatch=16", "mesh.fsdp=16"),
        ),
        (
            *("grpo", "v5litepod-16 --slices 2", "Qwen3-4B"),
            *("data.rows_per_microbatch=32", "mesh.data=2", "mesh.fsdp=16"),
        ),
    ]
]
HEAD = """\
| model, slice | task, method | mesh | rows x length | GiB a chip, of | s a step | tokens/s | MFU |
|---|---|---|---|---|---|---|---|"""


def outcome(arguments: str, kept: Path) -> dict[str, Any]:
    """What ``mwjax plan`` says, computed where ``kept`` does not hold it for the same arguments."""
    if kept.exists() and (known := json.loads(kept.read_text()))["arguments"] == arguments:
        return known["plan"]
    print(f"mwjax plan {arguments}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "mwjax", "plan", *shlex.split(arguments), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):  # 1: it does not fit, which is an answer
        raise SystemExit(done.returncode)
    (plan,) = json.loads(done.stdout)
    kept.parent.mkdir(parents=True, exist_ok=True)
    whole_file.write(kept, json.dumps({"arguments": arguments, "plan": plan}, indent=1))
    return plan


def cells(arguments: str, plan: dict[str, Any]) -> list[str]:
    """A row of the table."""
    source, *options = shlex.split(arguments)
    config = load.load(source, [option for option in options if "=" in option])
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan["mesh"].items() if size > 1)
    rows = f"{config.data.rows_per_microbatch} x {config.data.row_length // 1024}k"
    if plan["method"] == "sdcc" and config.data.teacher_row_length:
        rows += f", teacher {config.data.teacher_row_length // 1024}k"
    name = plan["model"].removeprefix("Qwen/")
    several = f"{plan['slices']} x " if plan["slices"] > 1 else ""
    first = [f"{name}, {several}{plan['slice']}", f"{config.loss.task}, {plan['method']}", mesh, rows]
    if not plan["fits"]:
        return [*first, "does not fit", "", "", ""]
    gib, estimate = 2**30, plan["estimate"]
    return [
        *first,
        f"{plan['memory']['total'] / gib:.1f} of {plan['usable_bytes'] / gib:.4g}",
        f"{estimate['seconds']:#.3g}",
        f"{estimate['tokens_per_second'] / 1000:.3g}k",
        f"{estimate['mfu']:.0%}".replace("%", " %"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="*", help="numbers of rows, from 1 on; all by default")
    parser.add_argument("--out", type=Path, default=Path("runs/plans"), help="a folder")
    parser.add_argument("--commands", action="store_true", help="print the commands and run nothing")
    arguments = parser.parse_args()
    numbers = range(1, len(ROWS) + 1)
    chosen = arguments.rows or numbers
    if unknown := [number for number in chosen if number not in numbers]:
        parser.error(f"no row {unknown[0]}: they are numbered 1 to {len(ROWS)}")
    if arguments.commands:
        print("\n".join(f"mwjax plan {ROWS[number - 1]}" for number in chosen))
        return
    print(HEAD)
    for number in chosen:
        asked = ROWS[number - 1]
        plan = outcome(asked, arguments.out / f"{number}.json")
        print(f"| {' | '.join(cells(asked, plan))} |", flush=True)


if __name__ == "__main__":
    main()
