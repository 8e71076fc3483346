"""Where an audit goes: the terminal, and files if asked for."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

from etils import epath
from rich.console import Console

from mwjax.audit.audit_page import audit_html
from mwjax.audit.compared import ComparedFiles, compared_json
from mwjax.audit.comparison_page import compared_html
from mwjax.audit.result import AuditResult, to_json
from mwjax.audit.terminal import show, show_compared
from mwjax.rollouts.read import summary
from mwjax.rollouts.storage import replacing


def terminal() -> Console:
    """The console for results. Text that the terminal's encoding lacks is written escaped instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(highlight=False)


def deliver(
    result: AuditResult, *, json_file: epath.PathLike | None = None, html_file: epath.PathLike | None = None
) -> None:
    """Print the audit, refusals on stderr, and write it as JSON (``-`` prints that instead) and as an HTML page.

    Raises:
        RolloutFileError: a file cannot be written.
    """
    print(summary(result.rollouts, list(result.refused)), file=sys.stderr)
    if result.rows is not None:
        read = summary(result.rows.rows, list(result.rows.refused)).replace("rollout", "training row", 1)
        print(read, file=sys.stderr)
    if json_file != "-" and result.usable:
        show(result, terminal())
    _write_json(to_json(result), json_file)
    if html_file is not None:
        with replacing(html_file) as out:
            out.write(audit_html(result).encode())


def deliver_compared(
    compared: ComparedFiles, *, json_file: epath.PathLike | None = None, html_file: epath.PathLike | None = None
) -> None:
    """Like :func:`deliver`, for audits of several files side by side."""
    for name, result in zip(compared.names, compared.results):
        print(f"{name}: {summary(result.rollouts, list(result.refused))}", file=sys.stderr)
    if json_file != "-" and compared.usable:
        show_compared(compared, terminal())
    _write_json(compared_json(compared), json_file)
    if html_file is not None:
        with replacing(html_file) as out:
            out.write(compared_html(compared).encode())


def _write_json(value: Any, json_file: epath.PathLike | None) -> None:
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    elif json_file is not None:
        with replacing(json_file) as out:
            out.write(text.encode())
