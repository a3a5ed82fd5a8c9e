"""The same seed draws the same cases, whatever else Hypothesis drew in the process before."""

import os
from pathlib import Path

import pytest

from . import imported

SCRIPT = """
import sys
import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
import eagletwin.harness.commands.fuzz.search  # modules of a checkout, in whose source Hypothesis finds numbers
from eagletwin.cases.sample_cases import draw_from_seeds_alone
from eagletwin.cases.blocks import Asked, block_of
from eagletwin.cases.strategies import cases, focus_of

def drawn():
    seen = [repr(case) for number in range(4) for case in block_of(7, number, Asked()).cases()]
    @hypothesis.seed(7)
    @settings(max_examples=30, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(cases(focus_of(3)))
    def look(case):
        seen.append(repr(case))
    look()
    return seen

if sys.argv[1] == "before":
    drawn()
draw_from_seeds_alone()
print("\\n".join(drawn()))
"""


@pytest.mark.slow
def test_cases_do_not_depend_on_what_was_drawn_before() -> None:
    first, second = (
        imported.run(["-c", SCRIPT, when], Path(__file__).parents[2], os.environ) for when in ("nothing", "before")
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert len(first.stdout.splitlines()) >= 20
    assert first.stdout == second.stdout
