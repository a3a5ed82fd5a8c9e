"""Traces of strangers, read: their digests are right, and their case is one that the recipes admit."""

from pathlib import Path

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import read_input, refuse_duplicates
from eagletwin.harness.core.trace import HEADER, MAX_HEADER_BYTES, Trace, load_trace

from .valid import check_case


def read_trace(folder: Path) -> Trace:
    """The trace in a folder. Raises InputError, naming the file, if it is absent, truncated, edited or of another schema, or if
    its case is not valid."""
    return load_trace(folder, check_case)


def strangers_trace(folder: Path) -> Trace:
    """The same of a trace that no engine of this process has just written. Raises InputError for a key that is given twice
    too: msgspec takes the last, and the digest is of both."""
    trace = read_trace(folder)
    for file in sorted(folder.rglob(HEADER)):
        try:
            refuse_duplicates(read_input(file, MAX_HEADER_BYTES))
        except ValueError as error:
            raise InputError(
                f"{file}: {error}", consequence="the trace was not judged", remedy="record the trace again"
            ) from error
    return trace
