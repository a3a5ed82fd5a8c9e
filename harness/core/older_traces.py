"""Traces of older schemas, as those of this one are. Called by trace.py, which reads them.

What schema 4 adds, the logits that a verify samples from, cannot be put into an older trace: the judge does without there. Nor
can the numbers that schema 5 demands (judge/completeness.py).
"""

import msgspec
import numpy as np
from torch import Tensor

from .arrays import Array, counts_of, runs_of
from .records import Header

Tensors = dict[str, Tensor | Array]


def named(header: Header) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor, which schemas up to 2 store together. Raises ValueError if a record names a tensor
    that is missing."""
    found = [(one.name, one.dtype, one.shape) for one in header.stored]
    there = {name for name, _, _ in found}
    missing = [f"{n}.{name}" for n, one in enumerate(header.records) for name in one.tensors if f"{n}.{name}" not in there]
    if missing:
        raise ValueError(f"tensor {missing[0]} is missing")
    return found


def as_now(header: Header, tensors: Tensors) -> tuple[Header, Tensors]:
    """The same trace in this schema. Raises ValueError if a tensor of a pair is not there."""
    if header.schema < 2:
        tensors = _free_in_runs(header, tensors)
    return _rows_together(header, tensors) if header.schema < 3 else (header, tensors)


def _free_in_runs(header: Header, tensors: Tensors) -> Tensors:
    """Schema 1 lists each free slot by itself."""
    lists = [f"{n}.free" for n, record in enumerate(header.records) if "free" in record.tensors]
    return tensors | {name: runs_of(counts_of(np.asarray(tensors[name]), 0)) for name in lists}


def _rows_together(header: Header, tensors: Tensors) -> tuple[Header, Tensors]:
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
