"""What rules are given: one trace with its replays, how to compare, and each other."""

from typing import TypeVar

from eagletwin.harness.core.records import Key, Record
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import View

from .bounds import FLOAT32, bounds_of
from .compare import PHASE_OF, Compare, Place
from .engines import view_of_engine
from .model import model_of
from .replay import RequestReplay, Round, impossible_requests

_Of = TypeVar("_Of", bound="Rules")


class Context:
    """One trace, and what its rules share.

    numbers     of its records, by key; view: that of the replays
    work        the records of its chunks and rounds, by request; ended: number and record of its end
    iterations  the record of each
    engine      the conventions of the engine that left the trace
    impossible  by request, of those that ask for what cannot be: see replay.py
    """

    def __init__(self, trace: Trace, replays: dict[str, RequestReplay], without: frozenset[str], view: View) -> None:
        self.trace, self.replays, self.view, self.case = trace, replays, view, trace.header.case
        self.model = model_of(trace.header, view)
        self.engine = view_of_engine(trace.header.engine.name)
        # of a recording no float is compared
        self.bounds = bounds_of(trace.header.engine.dtype, self.case.model) if self.model.numbers else FLOAT32
        requests = [request.id for request in self.case.requests]
        self.compare = Compare(requests, without, self.bounds, self.model.latent, windows=self.model.windows)
        self.numbers = {record.key: n for n, record in enumerate(trace.header.records)}
        self.work: dict[str, list[Record]] = {request: [] for request in requests}
        self.ended: dict[str, tuple[int, Record]] = {}
        self.iterations: dict[int, Record] = {}
        for number, record in enumerate(trace.header.records):
            if record.stage in ("prefill", "verify"):
                self.work[record.request].append(record)
            elif record.stage == "finished":
                self.ended[record.request] = number, record
            elif record.stage == "iteration":
                self.iterations[record.iteration] = record
        self.impossible = impossible_requests(trace, replays)
        self._rules: dict[type[Rules], Rules] = {}

    def of(self, kind: type[_Of]) -> _Of:
        """The rules of a class, of which each trace has one."""
        if kind not in self._rules:
            self._rules[kind] = kind(self)
        found = self._rules[kind]
        assert isinstance(found, kind)
        return found

    def round(self, record: Record) -> Round:
        return self.replays[record.request].rounds[record.round]

    def chunk(self, number: int, record: Record) -> range:
        """Positions of a prefill forward's chunk; by its own slots if the run ended before the chunk did."""
        boundary = self.numbers.get(Key(record.request, record.round, "prefill", record.step, attempt=record.attempt))
        if boundary is None:
            return range(record.step, record.step + len(self.trace.array(number, "slots")))
        return range(record.step, self.trace.header.records[boundary].numbers["end"])

    def table(self, record: Record) -> list[int] | None:
        """req_to_token of the request at the boundary record that goes with an inner one; None if the run ended before it."""
        boundary, step, attempt = "draft", 0, 0
        if record.stage in ("target.extend", "draft.extend"):
            boundary, step, attempt = "prefill", record.step, record.attempt
        number = self.numbers.get(Key(record.request, record.round, boundary, step, attempt=attempt))
        return None if number is None else self.trace.integers(number, "table")

    def committed_rows(self, number: int, record: Record) -> int:
        """How many rows of a request a record committed."""
        if record.stage == "target.extend":
            return len(self.chunk(number, record))
        return self.round(record).end - self.round(record).committed if record.stage == "extend" else 0


class Rules:
    """A family of rules, of one trace. Its methods are declared by `rule` and `stages` (rules/__init__.py)."""

    def __init__(self, context: Context) -> None:
        self._context, self._trace, self._replays, self._case = context, context.trace, context.replays, context.case
        self._compare, self._model, self._bounds = context.compare, context.model, context.bounds
        self._engine = context.engine
        self._records = context.trace.header.records
        self.begin()

    def begin(self) -> None:
        """What is known before the first record."""

    def _replay(self, record: Record) -> RequestReplay:
        return self._replays[record.request]

    def _round(self, record: Record) -> Round:
        return self._context.round(record)

    def _place(self, record: Record, step: int = 0, *, output: bool = False, layer: int = 0) -> Place:
        """Where the numbers of a record stand that its own stage made."""
        return Place(record, PHASE_OF[record.stage], step, output, layer)

    def _has_output(self, record: Record) -> bool:
        """Whether the reference has rows of a prefill's request, and a token behind the chunk. Without them nothing that comes
        out of it can be compared, and the rules of what goes into it say why."""
        replay = self._replay(record)
        return replay.target_rows is not None and replay.goes_on_behind(record.numbers["end"] - 1)
