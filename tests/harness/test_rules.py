"""The registry of rules: what is read of the source is what runs."""

import subprocess
import sys

from eagletwin.harness.judge import judge
from eagletwin.harness.judge.rules import catalogue

# Read from the source first, then from the functions themselves.
_TWICE = """
from eagletwin.harness.judge import rules
read = dict(rules.catalogue())
rules._DECLARED.clear()
from eagletwin.harness.judge.judge import methods
methods()
assert read == dict(sorted(rules._DECLARED.items())), read.keys() ^ rules._DECLARED.keys()
print(len(read))
"""


def test_the_source_declares_what_importing_it_does() -> None:
    done = subprocess.run([sys.executable, "-c", _TWICE], capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout.strip()) == ("", str(len(catalogue())))


def test_a_rule_has_the_stages_of_its_function_and_those_of_others() -> None:
    found = catalogue()
    assert found["target.inputs"].stages == ("target.extend",)
    assert found["output.tokens"].stages == ("prefill", "finished")
    assert {stage for one in found.values() for stage in one.stages} <= {stage for stage, _, _ in judge.methods()} | {"end"}
