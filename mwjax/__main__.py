"""``python -m mwjax`` is ``mwjax``."""

from mwjax.cli import main

main()
