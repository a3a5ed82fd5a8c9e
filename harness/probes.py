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
    given = {"committed": list(_COMMITTED), "slots": [slot for mine in slots for slot in mine]}
    wanted = [[mine[step] for mine in slots] for step in range(_NUM_STEPS - 1)]
    return _compare("draft.slots", "slots planned for draft decode step", wanted, host.probe(Asked("step_slots", given)))


def _kept_states(host: Host) -> Verdict:
    """What is kept of a request for the next graph is the states of its own last num_steps - 1 rows in this batch."""
    rows = _NUM_STEPS + 1
    states = [10 * (request + 1) + row for request in range(2) for row in range(rows)]
    given = {"states": states, "stale": [900 + state for state in states], "num_steps": [_NUM_STEPS]}
    wanted = [states[rows * request :][:rows][1 - _NUM_STEPS :] for request in range(2)]
    return _compare("draft.hidden_in", "states kept of request", wanted, host.probe(Asked("kept_states", given)))


def _compare(rule: str, what: str, wanted: list[list[int]], found: list[list[int]]) -> Verdict:
    """Row for row: the first that differs is the divergence."""
    for number, row in enumerate(wanted):
        told = found[number] if number < len(found) else []
        if told != row:
            first = Divergence(
                rule=rule,
                request="",
                round=0,
                stage="draft.decode",
                step=number + 1,
                iteration=0,
                index=f"{what} {number + 1}",
                expected=str(row),
                actual=str(told),
            )
            return Verdict(status="diverged", rule=rule, first=first)
    return Verdict(status="equal", checked={rule: len(wanted)})


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
        Probe(
            id="22832",
            title="Keep the hidden states of the batch that ran, not of the last CUDA graph's (multi-layer)",
            rule="draft.hidden_in",
            buggy="0.5.9 - 0.5.10.post1",
            fixed="0.5.11",
            last_bad="0.5.10.post1",
            trigger="multi-layer EAGLE with CUDA graphs, and a batch that is too large for them; here its draft extend alone",
            asks=f"kept_states {_NUM_STEPS}",
            ask=_kept_states,
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
