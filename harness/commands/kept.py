"""Measurements that are kept as JSON files of docs/records, one for each thing that was measured, and read again."""

from pathlib import Path
from typing import TypeVar

import msgspec

from eagletwin.harness.core.errors import InputError

Kept = TypeVar("Kept", bound=msgspec.Struct)


def read_kept(file: Path, empty: Kept, consequence: str) -> Kept:
    """What a file holds; `empty`, if there is none. Raises InputError for a file of another kind."""
    if not file.exists():
        return empty
    try:
        return msgspec.json.decode(file.read_bytes(), type=type(empty))
    except (msgspec.MsgspecError, OSError) as error:
        raise InputError(f"{file}: {error}", consequence=consequence, remedy="remove the file") from error


def write_kept(file: Path, measured: msgspec.Struct) -> None:
    """Keep it, in place of what was there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(measured)) + b"\n")
    partial.replace(file)
