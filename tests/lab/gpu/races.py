"""Races between the streams of a GPU: a case that was judged runs again with pauses, and must be answered alike.

The taps wait for the GPU, and so hide a missing wait. A second run has none of them (engines/sglang/drive.py); of it is known
what requests were sent (tokens, why they ended, counts, how many drafts each round accepted, logprobs) and which rows the
prefix cache keeps. Greedy tokens do not depend on drafts: a draft that was raced shows in the accepted ones, or in the rows.
"""

from pathlib import Path

import msgspec
from msgspec import Struct
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.records import Jitter, Jittered, Pause, Record
from eagletwin.harness.core.run_spec import Limits
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import EngineProcess
from eagletwin.harness.judge.trace_diff import diff

RACE = "race"  # of a case that was answered otherwise with pauses: in the place of a rule, which it is not
TOLD = ("finished", "cached")  # stages of what requests were sent, and of what the prefix cache keeps
_PLACES = ("slots", "window_slots")  # which slots rows have is nobody's answer
_LIMITS = Limits(step=20.0, case=60.0)


class Race(Struct, frozen=True, kw_only=True):
    """A run with pauses.

    points, pauses  where there might have been one, and where there was: a point's number, place, microseconds
    compared        numbers and tensors
    differs         the first that is not as it was without pauses, or how the run ended; empty: nothing
    """

    jitter: Jitter
    points: int = 0
    pauses: tuple[Pause, ...] = ()
    compared: int = 0
    differs: str = ""


def jitter_of(seed: int) -> Jitter:
    """Pauses for the run of this seed: many short ones, and for odd seeds few long ones, which outlast a batch's way through
    Python."""
    return Jitter(seed, share=0.05, longest=60_000) if seed % 2 else Jitter(seed)


def race(engine: EngineProcess, case: Case, judged: Trace, jitter: Jitter, folder: Path) -> Race:
    """Run a case once more with pauses, its trace in `folder`. judged: the run that was judged, and is equal."""
    return raced(judged, engine.run(case, folder, _LIMITS, jitter=jitter), jitter)


def raced(judged: Trace, other: Trace, jitter: Jitter) -> Race:
    """What became of a run with pauses: `other`."""
    found = other.header.jittered
    jittered = found if isinstance(found, Jittered) else Jittered(jitter, 0, ())
    result = Race(jitter=jitter, points=jittered.points, pauses=jittered.pauses)
    ending = other.header.ending
    if ending.kind != "finished":
        return msgspec.structs.replace(result, differs=f"{ending.kind} {ending.detail}".strip())
    compared = diff(told(judged), told(other))
    wrong = next((one for one in compared.differences if not one.bits), None)
    differs = f"{wrong.where}: {wrong.left} | {wrong.right}" if wrong is not None else ""
    return msgspec.structs.replace(result, compared=compared.compared, differs=differs)


def told(trace: Trace) -> Trace:
    """What requests were sent, and the rows that the prefix cache keeps; of each rank."""
    records, tensors = list[Record](), dict[str, Tensor | Array]()
    for number, record in enumerate(trace.header.records):
        if record.stage in TOLD:
            names = tuple(name for name in record.tensors if name not in _PLACES)
            tensors |= {f"{len(records)}.{name}": trace.tensors[f"{number}.{name}"] for name in names}
            records.append(msgspec.structs.replace(record, tensors=names))
    header = msgspec.structs.replace(trace.header, records=tuple(records))
    return Trace(header, tensors, [told(other) for other in trace.others])
