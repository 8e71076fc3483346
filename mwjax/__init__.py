"""mwjax: train agents on the contexts they actually saw."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mwjax")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0.0.0"
