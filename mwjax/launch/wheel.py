"""This mwjax as a wheel: built from the checkout it runs from, or put together again from what is installed."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import mwjax
from mwjax.launch.commands import Command
from mwjax.launch.job import LaunchError

PARTS = ("pyproject.toml", "README.md", "LICENSE", "mwjax")


@dataclass(frozen=True)
class Wheel:
    """digest: of what it is made of, so that the same one need not be installed twice."""

    path: Path
    digest: str


def folder(name: str) -> Path:
    """Where things for the job ``name`` are put together."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "mwjax" / "launch" / name


def filename() -> str:
    return f"mwjax-{mwjax.__version__}-py3-none-any.whl"


def checkout() -> Path | None:
    """The checkout mwjax runs from; None where it is installed."""
    root = Path(mwjax.__file__).resolve().parent.parent
    return root if all((root / part).exists() for part in PARTS) else None


def build_commands(root: Path, work: Path) -> list[Command]:
    """How the wheel in ``work`` is built: from a copy, since a build leaves files, and takes old ones, beside its
    source."""
    copy = work / "source"
    if importlib.util.find_spec("pip"):
        tool: Command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(work))
    else:
        tool = ("uv", "build", "--quiet", "--wheel", "--out-dir", str(work))
    return [
        ("rm", "-rf", str(work)),
        ("mkdir", "-p", str(copy)),
        ("cp", "-R", *(str(root / part) for part in PARTS), str(copy)),
        (*tool, str(copy)),
    ]


def source_digest(root: Path) -> str:
    """Of all files a wheel of the checkout is built from."""
    total = hashlib.sha256()
    for part in PARTS:
        files = [root / part] if (root / part).is_file() else sorted((root / part).rglob("*"))
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                total.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return total.hexdigest()[:12]


def make(name: str, given: str | None = None) -> Wheel:
    """The wheel for the job ``name``: the one at the path ``given``, or made. Raises LaunchError."""
    if given is not None:
        return read(Path(given))
    work, root = folder(name), checkout()
    if root is None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        return read(repack(importlib.metadata.distribution("mwjax"), work))
    for command in build_commands(root, work):
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise LaunchError(f"building the wheel: {command[0]} is not installed: pip install uv") from error
        if done.returncode:
            raise LaunchError(f"building the wheel: {' '.join(command)} failed:\n{done.stderr.strip()}")
    built = sorted(work.glob("mwjax-*.whl"))
    if len(built) != 1:
        raise LaunchError(f"building the wheel left {len(built)} wheels in {work}")
    return Wheel(built[0], source_digest(root))


def read(path: Path) -> Wheel:
    """Raises LaunchError where there is no mwjax wheel."""
    if not (path.name.startswith("mwjax-") and path.suffix == ".whl"):
        raise LaunchError(f"{path}: expected a wheel of mwjax, as mwjax-VERSION-py3-none-any.whl")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = sorted((entry.filename, entry.CRC) for entry in archive.infolist())
    except (OSError, zipfile.BadZipFile) as error:
        raise LaunchError(f"{path}: cannot be read as a wheel: {error}") from error
    return Wheel(path.resolve(), hashlib.sha256(repr(entries).encode()).hexdigest()[:12])


def repack(installed: importlib.metadata.Distribution, work: Path) -> Path:
    """A wheel with the files of an installed mwjax. Raises LaunchError where they are not all there."""
    info = f"mwjax-{installed.version}.dist-info"
    target = work / f"mwjax-{installed.version}-py3-none-any.whl"
    record: list[tuple[str, str, int | str]] = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in installed.files or ():
            name = file.as_posix()
            if not name.startswith(("mwjax/", info)) or "__pycache__" in name or name.startswith(f"{info}/RECORD"):
                continue
            if name in (f"{info}/INSTALLER", f"{info}/REQUESTED", f"{info}/direct_url.json"):
                continue  # about that installation
            content = Path(str(file.locate())).read_bytes()
            archive.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append((name, f"sha256={digest}", len(content)))
        if not any(name == "mwjax/cli.py" for name, _, _ in record):
            raise LaunchError("mwjax is not installed as files a wheel could be made of: give --wheel PATH")
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([*record, (f"{info}/RECORD", "", "")])
        archive.writestr(f"{info}/RECORD", lines.getvalue())
    return target
