"""Logs of other tools as rollouts: one module per format (:mod:`reader` says what it must have), found by detection."""

from mwjax.rollouts.readers.detect import READERS, detect
from mwjax.rollouts.readers.importing import Imported, import_files
from mwjax.rollouts.readers.reader import Found, Head, Item, Options, Reader, Remark, sampling_of
from mwjax.rollouts.readers.rendered import rendering_for, template_options
from mwjax.rollouts.readers.skew import Difference, Skew, check_rendering
from mwjax.rollouts.readers.supplied import opening_in, tools_in

__all__ = [
    "READERS",
    "Difference",
    "Found",
    "Head",
    "Imported",
    "Item",
    "Options",
    "Reader",
    "Remark",
    "Skew",
    "check_rendering",
    "detect",
    "import_files",
    "opening_in",
    "rendering_for",
    "sampling_of",
    "template_options",
    "tools_in",
]
