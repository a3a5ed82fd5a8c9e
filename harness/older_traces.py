"""Traces of older schemas, as those of this one are. Called by trace.py, which reads them."""

from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct
from torch import Tensor

from .slot_runs import Array, counts_of, runs_of

if TYPE_CHECKING:
    from .trace import Header

Tensors = dict[str, Tensor | Array]
Size = Annotated[int, Meta(ge=0, lt=1 << 32)]


class Stored(Struct, frozen=True, array_like=True, gc=False):
    """A tensor of a record, up to schema 2, which did not write them in the order of the records."""

    name: str
    dtype: str
    shape: tuple[Size, ...]


def named(header: "Header") -> list[tuple[str, str, tuple[int, ...]]]:
    """Up to schema 2 each tensor is named where its shape is. Raises ValueError if a record has one that is not there."""
    found = [(one.name, one.dtype, one.shape) for one in header.stored]
    there = {name for name, _, _ in found}
    missing = [f"{n}.{name}" for n, one in enumerate(header.records) for name in one.tensors if f"{n}.{name}" not in there]
    if missing:
        raise ValueError(f"tensor {missing[0]} is missing")
    return found


def as_now(header: "Header", tensors: Tensors) -> tuple["Header", Tensors]:
    """The same trace in this schema. Raises ValueError if a tensor of a pair is not there."""
    if header.schema < 2:
        tensors = _free_in_runs(header, tensors)
    return _rows_together(header, tensors) if header.schema < 3 else (header, tensors)


def _free_in_runs(header: "Header", tensors: Tensors) -> Tensors:
    """Schema 1 lists each free slot by itself."""
    lists = [f"{n}.free" for n, record in enumerate(header.records) if "free" in record.tensors]
    return tensors | {name: runs_of(counts_of(np.asarray(tensors[name]), 0)) for name in lists}


def _rows_together(header: "Header", tensors: Tensors) -> tuple["Header", Tensors]:
    """Up to schema 2 the keys and the values of a record's rows are apart, [L, n, G, D] each."""
    records, tensors = list(header.records), dict(tensors)
    for n, record in enumerate(records):
        parts = sorted({name.rpartition("_")[0] for name in record.tensors if name.endswith(("_keys", "_values"))})
        apart = {f"{part}_{which}" for part in parts for which in ("keys", "values")}
        if not apart.issubset(record.tensors):
            raise ValueError(f"record {n} has keys or values without the other")
        for part in parts:
            keys, values = (np.asarray(tensors.pop(f"{n}.{part}_{which}")) for which in ("keys", "values"))
            tensors[f"{n}.{part}_kv"] = np.ascontiguousarray(np.moveaxis(np.stack([keys, values]), 2, 0))
        names = (*(name for name in record.tensors if name not in apart), *(f"{part}_kv" for part in parts))
        records[n] = msgspec.structs.replace(record, tensors=names)
    return msgspec.structs.replace(header, records=tuple(records)), tensors
