"""The ledger's probes on this SGLang: green as it is where the bug is fixed, red without the fix; of a live one the reverse."""

import pytest

from eagletwin.cases.ledger import PROBES
from eagletwin.harness.check.trials import ask
from eagletwin.harness.engines.host import Host

TOLD_APART = [name for name, probe in PROBES.items() if probe.revert is not None or probe.remedy is not None]


@pytest.mark.parametrize("name", TOLD_APART)
def test_a_probe_is_red_with_its_bug_and_green_without(host: Host, name: str) -> None:
    probe = PROBES[name]
    change = probe.revert or probe.remedy
    assert change is not None
    released, changed = ask(probe, host), ask(probe, host, (change,))
    green, red = (released, changed) if probe.fixed else (changed, released)
    assert green.status == "equal"
    assert (red.status, red.rule) == ("diverged", probe.rule)


def test_a_refused_plan_shows_what_the_step_was_handed(host: Host) -> None:
    """As on 0.5.12: the slots of both requests' three steps, and no plan."""
    probe = PROBES["26239"]
    assert probe.revert is not None
    first = ask(probe, host, (probe.revert,)).first
    assert first is not None
    assert first.actual == str(probe.call.given["slots"])
