"""Logs of other tools as rollouts: one module per format (:mod:`reader` says what it must have), found by detection."""

from mwjax.rollouts.readers.detect import READERS, detect
from mwjax.rollouts.readers.importing import Imported, import_files
from mwjax.rollouts.readers.reader import Found, Head, Item, Options, Reader, Remark, sampling_of

__all__ = [
    "READERS",
    "Found",
    "Head",
    "Imported",
    "Item",
    "Options",
    "Reader",
    "Remark",
    "detect",
    "import_files",
    "sampling_of",
]
