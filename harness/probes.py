"""Fixes of what no case can reach without a GPU: one function of the release is called for real, and its answer judged.

A probe stands beside the ledger's entries where releases are compared (`prove --releases`, docs/releases.md): it has their
facts, and `ask` in place of a case.
"""

from collections.abc import Callable
from dataclasses import dataclass

from eagletwin.reference.layout import draft_columns

from .engines.process import Host
from .engines.wire import Probe as Asked
from .judge import Divergence, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One known bug, as in cases/entry.py. asks: what the release is asked; ask: does so, and judges."""

    id: str
    title: str
    rule: str
    buggy: str
    fixed: str
    last_bad: str
    trigger: str
    asks: str
    ask: Callable[[Host], Verdict]
    hidden: str = ""


_COMMITTED, _NUM_STEPS = (5, 9), 3


def _step_slots(host: Host) -> Verdict:
    """Step j of a chain writes each request's slot of column M + j - 1, and no other; the last step has no forward."""
    columns = [draft_columns(committed, 1, _NUM_STEPS, 256)[:, 0].tolist() for committed in _COMMITTED]
    slots = [[1000 * (request + 1) + column for column in mine] for request, mine in enumerate(columns)]
    allotted = [slot for mine in slots for slot in mine]
    planned = host.probe(Asked("step_slots", list(_COMMITTED), allotted, _NUM_STEPS))
    wanted = [[mine[step] for mine in slots] for step in range(_NUM_STEPS - 1)]
    for step in range(_NUM_STEPS - 1):
        found = planned[step] if step < len(planned) else []
        if found != wanted[step]:
            first = Divergence(
                rule="draft.slots",
                request="",
                round=0,
                stage="draft.decode",
                step=step + 1,
                index=f"slots planned for step {step + 1}, two requests of {_COMMITTED[0]} and {_COMMITTED[1]} tokens",
                iteration=0,
                expected=str(wanted[step]),
                actual=str(found),
            )
            return Verdict(status="diverged", rule=first.rule, first=first)
    return Verdict(status="equal", checked={"draft.slots": _NUM_STEPS - 1})


PROBES: dict[str, Probe] = {
    probe.id: probe
    for probe in (
        Probe(
            id="26239",
            title="Plan each draft step's slots without a CUDA graph (DeepSeek-V4)",
            rule="draft.slots",
            buggy="0.5.12 - 0.5.12.post1",
            fixed="0.5.13",
            last_bad="0.5.12.post1",
            trigger="the DeepSeek-V4 backend, num_steps >= 2, no CUDA graph; here its init_forward_metadata alone",
            asks=f"step_slots {_COMMITTED} {_NUM_STEPS}",
            ask=_step_slots,
        ),
    )
}


def probe_text(probe: Probe, verdict: Verdict, release: str) -> str:
    """What came of it, as a report would have it."""
    lines = [f"{verdict.status.upper()}  {probe.id} on SGLang {release} (cpu, one function called alone)"]
    if verdict.first is not None:
        lines += ["", f"  {verdict.rule}"]
        parts = (("index", verdict.first.index), ("expected", verdict.first.expected), ("actual", verdict.first.actual))
        lines += [f"  {name:9} {value}" for name, value in parts]
    return "\n".join(lines) + "\n"
