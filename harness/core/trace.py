"""What an engine did: records of integers, floats and KV rows by request, round and stage. Written as JSON and safetensors.

A trace holds the defined regions only (DESIGN §4): rows past the accepted ones and padding are left out by the adapter. It
can be judged again later, on another machine, without the engine. It is written by engines and read by the judge.

The file of tensors holds one flat tensor for each dtype, since some 600 small ones take half as long to read as to judge; the
header says how long the parts are, in the order of the records and their tensors.

Two layers. *Boundary* records are seen when the worker's stages return and exist on every engine. *Inner* records are seen
inside single forwards and are absent where no Python runs there (a replayed CUDA graph); `Header.inner` says which.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from safetensors import SafetensorError, TensorSpec, serialize
from safetensors.torch import load
from torch import Tensor

from .arrays import Array
from .case import Case, share_of_rank
from .differs import Differs, merge_differs
from .errors import InputError
from .files import read_input
from .recording import RecordingHeader, as_header, whole_tables
from .records import Ending, EngineInfo, Header, Key, Record

SCHEMA = 5
HEADER, TENSORS = "trace.json", "trace.safetensors"
# What a reader is willing to load. A case of 64 requests of 2,048 tokens on the largest recipe stays below it.
MAX_HEADER_BYTES = 1 << 27
MAX_TENSOR_BYTES = 1 << 32

INNER = ("target.extend", "draft.extend", "draft.decode", "target.verify", "draft.extend_decode")


class _Seal(Struct):
    """What is read of trace.json before its digest is known to be right."""

    schema: object = None
    sha256: object = None


# made once: a decoder costs as much as what it decodes here
_SEAL, _HEADER = msgspec.json.Decoder(_Seal), msgspec.json.Decoder(Header)
_RECORDING = msgspec.json.Decoder(RecordingHeader)
_Kind = TypeVar("_Kind", Header, RecordingHeader)


def new_header(
    case: Case,
    weights: str,
    engine: EngineInfo,
    ending: Ending,
    records: Sequence[Record],
    fallbacks: tuple[str, ...] = (),
    idle_edits: tuple[str, ...] = (),
    before: int = 0,
) -> Header:
    """A header of this schema; write_trace adds the digests.

    weights: digest of the numbers that the engine was given.
    fallbacks: kernels that did not run in the fast runtime. idle_edits: functions that a patch edited and the engine never
    called. before: how many cases the process had run when this one began.
    """
    return Header(
        schema=SCHEMA,
        case=case,
        weights=weights,
        engine=engine,
        inner=any(record.stage in INNER for record in records),
        ending=ending,
        records=tuple(records),
        fallbacks=fallbacks,
        idle_edits=idle_edits,
        before=before,
    )


class Trace:
    """A header and its tensors. `tensor(n, name)` is a tensor of record n.

    others  where this is the trace of rank 0 of several: those of the other ranks, in their order; of a pipeline's last stage,
            those of the stages before it, the nearest first
    """

    def __init__(self, header: Header, tensors: dict[str, Tensor | Array], others: Sequence["Trace"] = ()) -> None:
        self.header = header
        self.tensors = tensors
        self.others = tuple(others)

    @property
    def ranks(self) -> tuple["Trace", ...]:
        """The traces of all ranks; one without tensor parallelism. With DP attention each has its own rank's part of the
        case."""
        return (self,) if self.earlier else self.processes if self.header.engine.dp == 1 else self._shares

    @cached_property
    def _shares(self) -> tuple["Trace", ...]:
        cases = (share_of_rank(self.header.case, rank) for rank in range(self.header.engine.dp))
        return tuple(
            Trace(replace(one.header, case=case), one.tensors) for one, case in zip(self.processes, cases, strict=False)
        )

    @property
    def earlier(self) -> tuple["Trace", ...]:
        """The traces of a pipeline's earlier stages, the nearest first."""
        return self.others if self.header.engine.pp > 1 else ()

    def judged_of(self, rank: int | None) -> "Trace":
        """The trace in which a divergence of this rank (None: of one that is alone) was found. What an earlier stage of a
        pipeline has otherwise than the last one was found in the last one's."""
        return self if self.earlier else self.ranks[rank or 0]

    @property
    def processes(self) -> tuple["Trace", ...]:
        """The traces of all that ran the case together: ranks or stages."""
        return (self, *self.others)

    @property
    def differs(self) -> Differs | None:
        """In what the engine differs from its base, and which of that ran on any of the ranks; None: in nothing."""
        each = [rank.header.differs for rank in self.processes if isinstance(rank.header.differs, Differs)]
        return merge_differs(each) if each else None

    @property
    def changes(self) -> tuple[Differs, ...]:
        """What was changed in the engine, and which of it ran on any of the ranks: in its tree, then by each patch."""
        by_patch: dict[str, list[Differs]] = {change.patch: [] for change in self.header.patched or ()}
        for rank in self.ranks:
            for change in rank.header.patched or ():
                if change.patch in by_patch:
                    by_patch[change.patch].append(change)
        tree = [self.differs] if self.differs is not None else []
        return (*tree, *map(merge_differs, by_patch.values()))

    def tensor(self, number: int, name: str) -> Tensor:
        found = self.tensors[f"{number}.{name}"]
        return found if isinstance(found, Tensor) else torch.from_numpy(found)

    def array(self, number: int, name: str) -> Array:
        """The same in numpy: for integers."""
        found = self.tensors[f"{number}.{name}"]
        return on_host(found) if isinstance(found, Tensor) else found

    def integers(self, number: int, name: str) -> list[int]:
        """The same as a flat list."""
        found = self.tensors[f"{number}.{name}"]
        array = on_host(found) if isinstance(found, Tensor) else found
        if array.dtype.kind not in "iu":
            array = array.astype(np.int64)
        integers: list[int] = (array if array.ndim == 1 else array.ravel()).tolist()
        return integers


class When(NamedTuple):
    """Scheduler iteration and ordinal of the forward: of each record, and no part of its key."""

    iteration: int = 0
    forward: int = 0


_START = When()


class Recorder:
    """Collects records while an engine runs. Tensors are copied at once: workers write over their buffers. Arrays were made for
    the record (snapshot), and are kept as they are."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.tensors: dict[str, Tensor | Array] = {}
        self._attempts: dict[Key, int] = {}  # of each key of attempt 0

    def add(
        self,
        request: str,
        round: int,
        stage: str,
        *,
        step: int = 0,
        layer: int = 0,
        when: When = _START,
        numbers: dict[str, int] | None = None,
        tensors: Mapping[str, Tensor | Array] | None = None,
    ) -> None:
        number, tensors = len(self.records), tensors or {}
        key = Key(request, round, stage, step, layer)
        attempt = self._attempts.get(key, 0)
        self._attempts[key] = attempt + 1
        self.records.append(
            Record(
                request=request,
                round=round,
                stage=stage,
                step=step,
                layer=layer,
                attempt=attempt,
                iteration=when.iteration,
                forward=when.forward,
                numbers=numbers or {},
                tensors=tuple(tensors),
            )
        )
        for name, tensor in tensors.items():
            self.tensors[f"{number}.{name}"] = snapshot(tensor) if isinstance(tensor, Tensor) else tensor


def snapshot(tensor: Tensor) -> Array:
    """A copy on the host, which stays as it is when a worker writes over the tensor."""
    copy: Array = on_host(tensor).copy()
    return copy


def rank_folder(folder: Path | str, rank: int) -> Path:
    """Where a rank's trace is: that of rank 0 is in the folder of the case, the others' in folders in it."""
    return Path(folder, f"rank-{rank}") if rank else Path(folder)


def on_host(tensor: Tensor) -> Array:
    """The tensor in numpy, not copied unless it must be. numpy has no bfloat16; float32 holds each number of it."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.to(torch.float32)
    array: Array = (tensor if tensor.is_cpu else tensor.cpu()).numpy()
    return array


def write_trace(folder: Path, header: Header | RecordingHeader, tensors: Mapping[str, Tensor | Array]) -> None:
    """Write trace.safetensors, then trace.json with the digests of both; a reader that finds trace.json finds a whole trace."""
    dtypes, shapes, flat = [], [], dict[str, list[Array]]()
    for n, record in enumerate(header.records):
        for name in record.tensors:
            tensor = tensors[f"{n}.{name}"]
            array = on_host(tensor) if isinstance(tensor, Tensor) else tensor
            dtype, shape = _name(array.dtype), array.shape
            dtypes.append(dtype)
            shapes.append(shape)
            flat.setdefault(dtype, []).append(array if len(shape) == 1 else array.ravel())
    joined = {dtype: np.concatenate(parts) for dtype, parts in flat.items()} or {"float32": np.zeros(0, np.float32)}
    data = serialize({dtype: _spec(array) for dtype, array in joined.items()})  # reads from the arrays' own memory
    digest = hashlib.sha256(data).hexdigest()
    sealed = {"dtypes": " ".join(dtypes), "shapes": tuple(shapes), "tensors_sha256": digest, "sha256": ""}
    text = msgspec.json.encode(msgspec.structs.replace(header, **sealed))
    _write(folder / TENSORS, data)
    _write(folder / HEADER, _insert_digest(text, hashlib.sha256(text).hexdigest()))


@cache
def _name(dtype: np.dtype[Any]) -> str:
    """numpy works it out anew each time."""
    return str(dtype)


def _spec(array: Array) -> TensorSpec:
    return TensorSpec(dtype=_name(array.dtype), shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)


def _apart(flat: dict[str, Array], header: Header | RecordingHeader) -> dict[str, Tensor | Array]:
    """The tensors of the records, as views of the flat ones. Raises ValueError if the two do not go together."""
    begin, parts = dict.fromkeys(flat, 0), dict[str, Tensor | Array]()
    names = [f"{n}.{name}" for n, record in enumerate(header.records) for name in record.tensors]
    for name, dtype, shape in zip(names, header.dtypes.split(), header.shapes, strict=True):
        array = flat.get(dtype)
        if array is None:
            raise ValueError(f"no flat tensor of {dtype}")
        first, row = begin[dtype], len(shape) == 1
        end = begin[dtype] = first + (shape[0] if row else prod(shape))
        if end <= array.size:
            parts[name] = array[first:end] if row else array[first:end].reshape(shape)
    for dtype, array in flat.items():
        if array.shape != (begin[dtype],):
            raise ValueError(f"{begin[dtype]} numbers of {dtype} are named, and {array.shape} are there")
    return parts


def load_trace(folder: Path, check: Callable[[Case, str], None]) -> Trace:
    """The trace in a folder. Raises InputError, naming the file, if it is absent, truncated, edited or of another schema.

    check  raises InputError for a case that is not valid; its second argument says where the case is from
    """
    header = _header(folder, _HEADER)
    check(header.case, f"{folder / HEADER}: its case")
    others = range(1, header.engine.processes) if header.engine.rank == 0 else ()
    return Trace(header, _tensors(folder, header), [load_trace(rank_folder(folder, rank), check) for rank in others])


def load_recording(folder: Path) -> Trace:
    """The recording of one request of a server, as a trace. Raises InputError, naming the file, as load_trace does."""
    recorded = _header(folder, _RECORDING)
    tensors = _tensors(folder, recorded)
    try:
        records, tensors = whole_tables(recorded.records, tensors)
    except (KeyError, ValueError) as error:
        raise _inconsistent(folder, error) from error
    return Trace(as_header(recorded, records), tensors)


def _header(folder: Path, decoder: msgspec.json.Decoder[_Kind]) -> _Kind:
    data = _read(folder / HEADER, MAX_HEADER_BYTES)
    try:
        raw = _SEAL.decode(data)
        if isinstance(raw.schema, int) and raw.schema != SCHEMA:
            cause = f"trace schema {raw.schema}; this eagletwin reads {SCHEMA}"
            raise _refuse(folder / HEADER, cause, "use the eagletwin that wrote it, or record the trace again")
        seal = raw.sha256
        if (
            not isinstance(seal, str)
            or hashlib.sha256(data.replace(_insert_digest(b"", seal), _insert_digest(b"", ""))).hexdigest() != seal
        ):
            raise _refuse(folder / HEADER, "edited: its digest does not match its contents", "record the trace again")
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refuse(folder / HEADER, f"truncated or edited ({error})", "record the trace again") from error


def _tensors(folder: Path, header: Header | RecordingHeader) -> dict[str, Tensor | Array]:
    data = _read(folder / TENSORS, MAX_TENSOR_BYTES)
    if hashlib.sha256(data).hexdigest() != header.tensors_sha256:
        raise _refuse(
            folder / TENSORS, "truncated or edited: its digest is not the one in trace.json", "record the trace again"
        )
    try:
        flat = {dtype: on_host(tensor) for dtype, tensor in load(data).items()}
    except SafetensorError as error:
        raise _refuse(folder / TENSORS, f"not safetensors ({error})", "record the trace again") from error
    try:
        return _apart(flat, header)
    except ValueError as error:
        raise _inconsistent(folder, error) from error


def _inconsistent(folder: Path, error: Exception) -> InputError:
    return _refuse(folder / TENSORS, f"not what trace.json names ({error})", "record the trace again")


def _insert_digest(text: bytes, seal: str) -> bytes:
    """The header's JSON with its digest in place of the empty one; of empty text, the field alone."""
    field, empty = f'"sha256":"{seal}"'.encode(), b'"sha256":""'
    return text.replace(empty, field) if text else field


def _write(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(data)
    scratch.replace(path)


def _read(path: Path, limit: int) -> bytes:
    try:
        data = read_input(path, limit)
        if len(data) > limit:
            raise _refuse(path, f"larger than {limit} bytes", "record a smaller case")
        return data
    except OSError as error:
        raise _refuse(
            path, error.strerror or str(error), "name a folder that holds trace.json and trace.safetensors"
        ) from error


def _refuse(path: Path, cause: str, remedy: str) -> InputError:
    return InputError(f"{path}: {cause}", consequence="the trace was not judged", remedy=remedy)
