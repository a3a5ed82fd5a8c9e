"""Traces of strangers, read: their digests are right, and their case is one that the recipes admit."""

from pathlib import Path

from eagletwin.harness.core.trace import Trace, load_trace

from .valid import check_case


def read_trace(folder: Path) -> Trace:
    """The trace in a folder. Raises InputError, naming the file, if it is absent, truncated, edited or of a newer schema, or if
    its case is not valid."""
    return load_trace(folder, check_case)
