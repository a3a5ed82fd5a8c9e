"""Mutants of our own judge and reference, killed by what they say of recorded traces.

The traces are those of cases of the corpus, healthy ones and ones of mutants of the worker; and each healthy one again, changed
in one place. A mutant is killed if it says another thing of one of them: another status, rule, place or wrong
number, or another count of what the case exercised or of choices and ties, which reports show.
Each is planted in a fork of a process that has read all of it.
"""

import __future__

import ast
import functools
import gc
import importlib
import inspect
import os
import pickle
import shutil
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

import eagletwin
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.records import Ending
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import Source
from eagletwin.harness.families.valid import read_trace
from eagletwin.harness.judge.judge import judge

from .corpus import Known
from .draw import Mutant, mutants_of
from .hunt import COUNTED, LIMITS, Hunted, outcomes_in

# Healthy traces changed in one place, as a fault of a worker or an end of its process would have left them.

_OUTSIDE = 1 << 20  # of any vocabulary, tree, table and pool here
How = Literal["next", "outside", "alike", "cut"]


class Change(Struct, frozen=True):
    """One place of a trace.

    record  its number; name: of a tensor or a number of it
    how     `next`: one number is another one, of floats by a hundredth; `outside`: an integer that nothing has; `alike`: the
            first numbers are those of the record of its kind before it; `cut`: the run ended when the record was to come
    """

    record: int
    name: str
    how: How


class DrawnChange:
    """Draws changes, of each stage, name and way those first of which the fewest were drawn."""

    def __init__(self, seed: int) -> None:
        self._random, self._had = Random(seed), Counter[tuple[str, str, How]]()

    def of(self, trace: Trace, most: int) -> list[Change]:
        """Up to `most` changes of a trace."""
        by_kind: dict[tuple[str, str, How], list[Change]] = {}
        for number, record in enumerate(trace.header.records):
            names = [name for name in record.tensors if trace.tensor(number, name).numel()]
            for name in (*names, *record.numbers):
                for how in _ways(trace, number, name):
                    by_kind.setdefault((record.stage, name, how), []).append(Change(number, name, how))
            by_kind.setdefault((record.stage, "", "cut"), []).append(Change(number, "", "cut"))
        kinds = self._random.sample(sorted(by_kind), len(by_kind))
        kinds.sort(key=lambda kind: self._had[kind])
        self._had.update(kinds[:most])
        return [self._random.choice(by_kind[kind]) for kind in kinds[:most]]


def _ways(trace: Trace, number: int, name: str) -> list[How]:
    if name not in trace.header.records[number].tensors:
        return ["next"]
    floats = trace.tensor(number, name).is_floating_point()
    alike: list[How] = ["alike"] if _before(trace, number, name) is not None else []
    return ["next", *alike] if floats else ["next", "outside", *alike]


def _before(trace: Trace, number: int, name: str) -> Tensor | None:
    """The tensor of this name in the record of this stage before it, if its shape is the same."""
    own = trace.header.records[number]
    for other in range(number - 1, -1, -1):
        record = trace.header.records[other]
        if record.stage == own.stage and name in record.tensors:
            found = trace.tensor(other, name)
            return found if found.shape == trace.tensor(number, name).shape else None
    return None


def changed(trace: Trace, change: Change) -> Trace:
    """The trace with the change."""
    header, number, name = trace.header, change.record, change.name
    if change.how == "cut":
        ending = Ending(kind="crashed", detail="the trace was cut", where=header.records[number].stage)
        return Trace(replace(header, records=header.records[:number], ending=ending), trace.tensors, trace.others)
    own = header.records[number]
    if name not in own.tensors:
        before = own.numbers[name]
        records = [*header.records]
        records[number] = replace(own, numbers=own.numbers | {name: 1 - before if before in (0, 1) else before + 1})
        return Trace(replace(header, records=tuple(records)), trace.tensors, trace.others)
    tensor = trace.tensor(number, name).clone()
    _change(tensor.view(-1), trace, change)
    return Trace(header, {**trace.tensors, f"{number}.{name}": tensor}, trace.others)


def _change(flat: Tensor, trace: Trace, change: Change) -> None:
    at = int(flat.abs().argmax()) if flat.is_floating_point() else flat.numel() // 2
    if change.how == "alike":
        before = _before(trace, change.record, change.name)
        assert before is not None
        count = Random(f"{change.record} {change.name}").randint(1, max(1, flat.numel() - 1))
        flat[:count] = before.reshape(-1)[:count]
    elif flat.dtype == torch.bool:
        flat[at] = ~flat[at]
    elif change.how == "outside":
        flat[at] = min(_OUTSIDE, torch.iinfo(flat.dtype).max)
    else:
        flat[at] = flat[at] * 1.01 if flat.is_floating_point() else flat[at] + 1


SECONDS = 60  # of one trace; then the mutant hangs
ROOMS = ("reference", "harness/judge/rules", "harness/judge")  # a folder comes before the one that it is in
_UNFIT = ("overload", "contextmanager")
Said = tuple[Any, ...]


HEALTHY = 24  # traces of unmodified workers


def record(folder: Path, source: Source, corpus: Sequence[Known], outcomes: Sequence[Hunted]) -> None:
    """Record HEALTHY traces of as many blocks, and one of each mutant of the worker that a rule names. What is there stays."""
    first: dict[tuple[str, int], Known] = {}
    for known in corpus:
        first.setdefault((known.told, known.block), known)
    healthy = list(first.values())
    wanted: list[tuple[str, Known, tuple[Patch, ...]]] = []
    for number in range(HEALTHY):
        known = healthy[number * len(healthy) // HEALTHY]
        wanted.append((f"healthy-{number}", known, ()))
    for number, one in enumerate(outcomes):
        if one.outcome == "rule" and one.case >= 0:
            wanted.append((f"mutant-{number}", corpus[one.case], (one.mutant.patch,)))
    with Host(source=source) as host:
        for name, known, patches in wanted:
            into = folder / name
            if not (into / "view").exists():
                shutil.rmtree(into, ignore_errors=True)
                (into / "trace").mkdir(parents=True)
                host.engine(known.case, (*known.run.applied, *patches)).run(known.case, into / "trace", LIMITS)
                (into / "view").write_text(known.view)


def ask_all(traces: Path, outcomes: Path, asked: tuple[int, int, int, int], say: Callable[[str], None]) -> None:
    """Plant so many mutants, drawn with a seed, each judged on at most so many traces."""
    number, seed, changes, most = asked
    oracle = Oracle(traces, changes, seed)
    gc.freeze()
    done = {one.mutant: one for one in outcomes_in(outcomes)}
    found = oracle.mutants()
    say(f"{len(found)} mutants of lines that {len(oracle.heard)} traces run")
    counted = 0
    with outcomes.open("ab") as file:
        for mutant in Random(seed).sample(found, len(found)):
            if counted >= number:
                break
            came = done.get(mutant)
            if came is None:
                came = oracle.ask(mutant, most)
                file.write(msgspec.json.encode(came) + b"\n")
                file.flush()
                say(f"{counted + 1}: {came.outcome} {came.by}, {mutant.name}")
            counted += came.outcome in COUNTED


class Heard(Struct, frozen=True):
    """What the judge says of a trace, changed or not. ran: file -> lines."""

    trace: int
    change: Change | None
    said: Said
    ran: dict[str, frozenset[int]]


class Oracle:
    """The traces, and what our judge says of them."""

    def __init__(self, folder: Path, changes: int, seed: int) -> None:
        torch.set_num_threads(1)
        folders = sorted(one for one in folder.iterdir() if (one / "view").exists())
        self.traces = [read_trace(one / "trace") for one in folders]
        self.views: list[Any] = [(one / "view").read_text() for one in folders]
        self.names = [one.name for one in folders]
        self.heard: list[Heard] = []
        drawn = DrawnChange(seed)
        for number, trace in enumerate(self.traces):
            own = drawn.of(trace, changes) if self.names[number].startswith("healthy") else []
            self.heard += [self._listen(number, change) for change in (None, *own)]

    def _listen(self, number: int, change: Change | None) -> Heard:
        ran: dict[str, set[int]] = {}
        with _Noting(ran):
            said = self.say(number, change)
        return Heard(number, change, said, {file: frozenset(lines) for file, lines in ran.items()})

    def say(self, number: int, change: Change | None) -> Said:
        """What matters of the verdict."""
        trace = self.traces[number]
        try:
            verdict = judge(trace if change is None else changed(trace, change), view=self.views[number])
        except Exception as error:
            return ("error", type(error).__name__)
        first = verdict.first and (*verdict.first.place, verdict.first.index, verdict.first.expected, verdict.first.actual)
        counted = (verdict.exercised, verdict.choices, verdict.ties, verdict.adopted)
        return verdict.status, verdict.rule, first, verdict.vacuous, verdict.undecided, counted

    def mutants(self) -> list[Mutant]:
        """All mutants of lines that a trace runs."""
        ran: dict[str, set[int]] = {}
        for one in self.heard:
            for file, lines in one.ran.items():
                ran.setdefault(file, set()).update(lines)
        root = Path(eagletwin.__file__).parent
        found = []
        for room in ROOMS:
            for path in sorted((root / room).glob("*.py")):
                file = f"{room}/{path.name}"
                module = f"eagletwin.{file.removesuffix('.py').replace('/', '.')}"
                own = ran.get(_key(path), set())
                found += [one for one in mutants_of(path.read_text(), module, file, _UNFIT) if own & {one.line, one.block}]
        return found

    def ask(self, mutant: Mutant, most: int) -> Hunted:
        """In a fork: the first trace of which the mutant says another thing."""
        begun = time.monotonic()
        root = Path(eagletwin.__file__).parent
        key = _key(root / mutant.file)
        order = [one for one in self.heard if {mutant.line, mutant.block} & one.ran.get(key, frozenset())]
        Random(mutant.name).shuffle(order)
        order.sort(key=lambda one: one.change is not None)  # those of the worker first
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                pipe.write(pickle.dumps(self._ask(mutant, order[:most])))
                pipe.flush()
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        outcome, by, cases = pickle.loads(told) if told else ("crash", "a hang", 0)
        seconds = round(time.monotonic() - begun, 2)
        return Hunted(mutant=mutant, outcome=outcome, by=by, cases=cases, of=len(order), seconds=seconds)

    def _ask(self, mutant: Mutant, order: Sequence[Heard]) -> tuple[str, str, int]:
        try:
            plant(mutant)
        except Exception as error:
            return "unfit", f"{type(error).__name__}: {error}", 0
        for number, one in enumerate(order):
            signal.alarm(SECONDS)
            said = self.say(one.trace, one.change)
            if said != one.said:
                what = "healthy" if one.said[0] == "equal" else "a change" if one.change else "a fault of the worker"
                return "rule", f"{what}: {_told(one.said)} became {_told(said)}", number + 1
        return "survived", "", len(order)


def _told(said: Said) -> str:
    return " ".join(filter(None, said[:2]))


def _key(path: Path) -> str:
    return str(path.resolve())


class _Noting:
    """Notes the lines of our rooms that run."""

    def __init__(self, ran: dict[str, set[int]]) -> None:
        self._ran = ran
        root = Path(eagletwin.__file__).parent
        self._files = {}
        for room in ROOMS:
            for path in (root / room).glob("*.py"):
                self._files[str(path)] = _key(path)

    def __enter__(self) -> None:
        _forget()
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: Any, _event: str, _value: object) -> Callable[..., Any] | None:
        file = self._files.get(frame.f_code.co_filename)
        if file is None:
            return None
        lines = self._ran.setdefault(file, set())
        lines.add(frame.f_lineno)

        def line(frame: Any, _event: str, _value: object) -> Callable[..., Any]:
            lines.add(frame.f_lineno)
            return line

        return line


def _forget() -> None:
    """What functions of ours remember would hide a mutant."""
    for one in _remembering():
        one.cache_clear()


@functools.cache
def _remembering() -> list[Any]:
    kind = type(functools.cache(len))
    return [one for one in gc.get_objects() if type(one) is kind and one.__module__.startswith(_MODULES)]


_MODULES = tuple(f"eagletwin.{room.replace('/', '.')}" for room in ROOMS)


def plant(mutant: Mutant) -> None:
    """Give the function the mutant's code. Raises if it has none of its own."""
    function = _function(mutant.target)
    if function.__code__.co_freevars:
        raise ValueError(f"it uses {function.__code__.co_freevars} of around it")
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.match) != 1:
        raise ValueError("its source is another one")
    definition = ast.parse(source.replace(mutant.match, mutant.replacement)).body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    scope: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag  # some are for type checkers alone
    exec(compile(ast.Module([definition], []), "<mutant>", "exec", flags, dont_inherit=True), function.__globals__, scope)
    function.__code__ = scope[definition.name].__code__
    _forget()


def _function(target: str) -> Any:
    """The plain function behind a dotted name, under what wraps it."""
    room = next(room for room in _MODULES if target.startswith(f"{room}."))
    module, *names = target.removeprefix(f"{room}.").split(".")
    found: Any = importlib.import_module(f"{room}.{module}")
    for name in names:
        found = inspect.getattr_static(found, name)
        found = getattr(found, "__func__", getattr(found, "fget", found))
    return inspect.unwrap(found)
