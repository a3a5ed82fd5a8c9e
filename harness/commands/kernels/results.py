"""The process of the kernel tier, from outside: its messages, what they amount to, how they are printed, and how it is run.

A property is `equal`, `diverged` (an output differs, or a kernel leaves its tensors), `unknown` (the comparison was not made:
a crash, a planted fault that is not caught) or `absent` (this SGLang lacks something that the property calls).
"""

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from eagletwin.harness.core.differs import Differs
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN
from eagletwin.harness.core.files import RUN_MODULE
from eagletwin.harness.core.run_spec import CPU, Kernels
from eagletwin.harness.core.terminal import count, describe_exit
from eagletwin.harness.engines.source import Source
from eagletwin.harness.engines.start import _environment

Status = Literal["equal", "diverged", "unknown", "absent"]


class PropertyJob(Struct, frozen=True, kw_only=True):
    """What runs. version, root: of the SGLang that was named; both empty for the installed one. functions: whose faults are
    planted; trial: a few cases and no fault, to see what can be called."""

    version: str
    root: str
    properties: tuple[str, ...]
    functions: tuple[str, ...]
    kernels: Kernels
    examples: int
    seed: int
    trial: bool = False


class Imported(Struct, frozen=True, tag=True):
    """SGLang is imported: `sglang.__file__`, and what to call it."""

    file: str
    version: str


class NotImported(Struct, frozen=True, tag=True):
    """SGLang would not be imported."""

    why: str


class Began(Struct, frozen=True, tag=True):
    """A property is run next."""

    property: str


class Function(Struct, frozen=True, tag=True):
    """A function of the tier. where: its dotted name in this SGLang, "" if it cannot be reached, and then why. broken: the
    module is there and cannot be imported."""

    name: str
    where: str = ""
    why: str = ""
    broken: bool = False


class FaultsCaught(Struct, frozen=True):
    """Planted faults of one function: how many were caught, how many do not fit this source. silenced: none fits, and the
    property was tried with a function that does nothing instead."""

    function: str
    caught: int
    unfit: int
    missed: tuple[str, ...] = ()
    silenced: bool = False


class PropertyOutcome(Struct, frozen=True, tag=True, kw_only=True):
    """What running a property resulted in. case: the smallest that fails; detail: of what is unknown or absent."""

    property: str
    status: Status
    functions: tuple[str, ...]
    examples: int = 0
    proofs: tuple[FaultsCaught, ...] = ()
    case: str = ""
    what: str = ""
    expected: str = ""
    actual: str = ""
    detail: str = ""


class Done(Struct, frozen=True, tag=True):
    """All properties were run. differs: in what a tree differs from its base, and which of it ran."""

    differs: Differs | None = None


Message = Imported | NotImported | Began | Function | PropertyOutcome | Done


class Report(Struct, kw_only=True):
    """All that was sent. strict: a function that is absent may have been renamed, so that nothing is known of it."""

    named: tuple[str, ...]
    strict: bool
    imported: Imported | None = None
    functions: list[Function] = msgspec.field(default_factory=list)
    outcomes: list[PropertyOutcome] = msgspec.field(default_factory=list)
    differs: Differs | None = None
    end: str = ""  # why it did not finish

    def add(self, message: Message, job: PropertyJob) -> str:
        """Take a message over. Returns what a person reads of it at once."""
        if isinstance(message, Imported):
            self.imported = message
            return header(message, job)
        if isinstance(message, PropertyOutcome):
            self.outcomes.append(message)
            return line(message)
        if isinstance(message, Function):
            self.functions.append(message)
        elif isinstance(message, NotImported):
            self.end = message.why
        elif isinstance(message, Done):
            self.differs = message.differs
        return ""

    @property
    def looked_at(self) -> set[str]:
        """Those of the functions of which a property was compared, and holds or does not."""
        compared = {name for of in self.outcomes if of.status in ("equal", "diverged") for name in of.functions}
        return compared & {of.name for of in self.functions}

    @property
    def not_looked_at(self) -> list[str]:
        """Functions that nothing is known of, because this SGLang has them not or they cannot be called as the tier does."""
        return [of.name for of in self.functions if of.name not in self.looked_at]

    @property
    def exit_code(self) -> int:
        """0 all equal, 1 one diverged, 125 cannot tell. Nothing that was compared is 125."""
        statuses = [of.status for of in self.outcomes]
        if "diverged" in statuses:
            return EXIT_DIVERGED
        unseen = set(self.not_looked_at)
        unreached = self.differs is not None and self.differs.doubt
        in_doubt = (
            self.end or unreached or "unknown" in statuses or "equal" not in statuses or any(of.broken for of in self.functions)
        )
        if in_doubt or unseen & {*self.named} or (unseen and self.strict):
            return EXIT_UNKNOWN
        return EXIT_EQUAL

    def to_json(self) -> bytes:
        """The report as one JSON object, with the exit code and the status."""
        words = {EXIT_EQUAL: "equal", EXIT_DIVERGED: "diverged"}
        whole = msgspec.to_builtins(self) | {"exit_code": self.exit_code, "status": words.get(self.exit_code, "unknown")}
        return msgspec.json.format(msgspec.json.encode(whole), indent=1)


def header(imported: Imported, job: PropertyJob) -> str:
    """Which SGLang this is, and how it is run."""
    how = f"kernels {job.kernels}, {job.examples} examples a property, seed {job.seed}"
    return f"SGLang {imported.version}  {imported.file}\n{how}\n"


def line(of: PropertyOutcome) -> str:
    """One property on one line."""
    caught, tried = sum(p.caught for p in of.proofs), sum(p.caught + len(p.missed) for p in of.proofs)
    unfit = sum(p.unfit for p in of.proofs)
    notes = [count(of.examples, "example")]
    if tried:
        notes.append(f"{caught} of {count(tried, 'planted fault')} caught")
    if unfit:
        notes.append(f"{count(unfit, 'fault')} without a place in this source")
    return f"{of.status.upper():9} {of.property:36} {of.detail if of.status == 'absent' else ', '.join(notes)}"


def details(of: PropertyOutcome, again: str) -> str:
    """What there is to say of a property that diverged or is unknown."""
    rows = [("function" if number == 0 else "", name) for number, name in enumerate(of.functions)]
    rows += [("output", of.what), ("expected", of.expected), ("actual", of.actual), ("case", of.case), ("why", of.detail)]
    rows += [("why", f"no case fails with this fault in {p.function}: {fault}") for p in of.proofs for fault in p.missed]
    body = "\n".join(f"  {key:9}{text}" for key, text in (*rows, ("again", again)) if text)
    return f"\n{of.status.upper()}  {of.property}\n{body}"


def describe_uncompared(report: Report) -> str:
    """The functions that were not compared, and why. Empty if all were."""
    through = {name: of.detail for of in report.outcomes for name in of.functions}
    rows = [f"  {name}\n    {_why(report, name, through)}" for name in report.not_looked_at]
    return "\n".join(["\nNot compared:", *rows]) if rows else ""


def _why(report: Report, name: str, through: dict[str, str]) -> str:
    """Why nothing is known of a function. through: what its properties say."""
    own = next(of.why for of in report.functions if of.name == name)
    return own or through.get(name) or "no property of it was run"


def changes(report: Report) -> str:
    """In what a tree differs from its base, and which of it ran. Empty for a release."""
    return "\n".join(["", *report.differs.lines()]) if report.differs is not None else ""


def support(report: Report) -> str:
    """Each function of the tier: where this SGLang has it, and whether it can be called as the tier calls it."""
    through = {
        name: f"{of.property}: {of.detail or 'a planted fault is not caught'}"
        for of in report.outcomes
        for name in of.functions
    }
    unseen = set(report.not_looked_at)
    rows = []
    for of in report.functions:
        why = _why(report, of.name, through) if of.why or of.name in unseen else ""
        rows.append(f"{'no ' if why else 'yes'}  {of.name}")
        rows += [f"       in {of.where}"] if of.where not in ("", of.name) else []
        rows += [f"       {why}"] if why else []
    return "\n".join(rows)


def summary(report: Report) -> str:
    """The last line."""
    statuses = [of.status for of in report.outcomes]
    if report.exit_code == EXIT_DIVERGED:
        return f"DIVERGED  {statuses.count('diverged')} of {len(statuses)} properties"
    seen = f"{len(report.looked_at)} of {count(len(report.functions), 'function')} compared"
    if report.exit_code == EXIT_EQUAL:
        return f"EQUAL  {seen}"
    if report.end:
        return f"UNKNOWN  {report.end}"
    unknown = (
        f", {statuses.count('unknown')} of {len(statuses)} properties could not be compared" if "unknown" in statuses else ""
    )
    return f"UNKNOWN  {seen}{unknown}"


# Starts the process that runs the kernel tier, reads its messages, and outlives it whatever happens to it.

IMPORT_SECONDS = 300.0  # as for engines: some 10 s on an idle machine; the limit only ends what will never answer
_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
LOG_LINES = 8  # of the process's output, where it ended without a result


def run(source: Source, job: PropertyJob, limit: float) -> Iterator[Message]:
    """Messages of a process that runs the job on this SGLang, as they come. The last one is Done, or a Refused that says why
    the process did not get there.

    limit: seconds that one property and its planted faults may take.
    """
    with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
        log, changes = Path(scratch, "output"), []
        if source.difference is not None:
            changes = [str(Path(scratch, "changes.json"))]
            Path(changes[0]).write_bytes(msgspec.json.encode(source.difference.watch))
        reading, writing = os.pipe()
        try:
            with log.open("wb") as output:
                child = subprocess.Popen(
                    [*RUN_MODULE, f"{__package__}.runner", str(writing), msgspec.json.encode(job).decode(), *changes],
                    pass_fds=[writing],
                    env=_environment(source, CPU) | {"TMPDIR": scratch},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            os.close(writing)
            writing = -1
            try:
                yield from _messages(child, reading, limit, log)
            finally:
                child.kill()
                child.wait()
        finally:
            os.close(reading)
            if writing >= 0:
                os.close(writing)


def _messages(child: "subprocess.Popen[bytes]", pipe: int, limit: float, log: Path) -> Iterator[Message]:
    doing, wait, rest = "it imported SGLang", IMPORT_SECONDS, b""
    while True:
        end = time.monotonic() + wait
        while b"\n" not in rest:
            if not select.select([pipe], [], [], max(end - time.monotonic(), 0))[0]:
                yield NotImported(f"no answer within {wait:g} s while {doing}")
                return
            data = os.read(pipe, 1 << 16)
            if not data:
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
                said = "".join(f"\n    {line}" for line in lines)
                yield NotImported(f"the process {describe_exit(child.wait())} while {doing}{said}")
                return
            rest += data
        line, _, rest = rest.partition(b"\n")
        message = _DECODER.decode(line)
        if isinstance(message, Began):
            wait, doing = limit, f"{message.property!r} ran"
        else:
            wait = IMPORT_SECONDS
            doing = "it looked for functions" if isinstance(message, Imported) else doing
        yield message
        if isinstance(message, Done | NotImported):
            return
