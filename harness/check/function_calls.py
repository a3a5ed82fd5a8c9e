"""Ask a release by one call: the ledger's probes (cases/entry.py), whose bugs no case reaches without a GPU."""

from eagletwin.cases.entry import Probe
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.verdict import Divergence, Verdict
from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.host import Host


def ask(probe: Probe, host: Host, patches: tuple[Patch, ...] = ()) -> Verdict:
    """Make the call, with these changes in memory, and compare its rows: the first that differs is the divergence."""
    call = probe.call
    answered = host.probe(protocol.Probe(call.name, dict(call.given), patches))
    for number, row in enumerate(call.expected):
        actual = answered[number] if number < len(answered) else []
        if actual != row:
            first = Divergence(
                rule=probe.rule,
                request="",
                round=0,
                stage="draft.decode",
                step=number + 1,
                iteration=0,
                index=f"{call.what} {number + 1}",
                expected=str(row),
                actual=str(actual),
            )
            return Verdict(status="diverged", rule=probe.rule, first=first)
    return Verdict(status="equal", checked={probe.rule: len(call.expected)})


def probe_text(probe: Probe, verdict: Verdict, release: str) -> str:
    """What came of it, as a report would have it."""
    lines = [f"{verdict.status.upper()}  {probe.id} on SGLang {release} (cpu, one function called alone)"]
    if verdict.first is not None:
        lines += ["", f"  {verdict.rule}"]
        parts = (("index", verdict.first.index), ("expected", verdict.first.expected), ("actual", verdict.first.actual))
        lines += [f"  {name:9} {value}" for name, value in parts]
    return "\n".join(lines) + "\n"
