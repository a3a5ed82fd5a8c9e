"""Stubs import, and never return: a kernel that silently did nothing would pass for one that ran."""

import subprocess
import sys

PROGRAM = """
import importlib, sys
from eagletwin.harness.engines.sglang import stubs
stubs.install()
for name in stubs.STUBBED:
    module = importlib.import_module(name)
    deeper = importlib.import_module(f"{name}.some.thing")
    assert deeper.__name__ == f"{name}.some.thing"
    class Child(module.Base): pass
    def annotated(x: module.Type | None) -> "None": ...
    assert isinstance(Child(), Child)
    for call in (module.function, module.Class.method, deeper.op):
        try:
            call(1)
        except stubs.StubCalled as error:
            assert name in str(error) and "<string>" in str(error), error
        else:
            raise AssertionError(f"{name} returned")
assert len(stubs.called) == 3 * len(stubs.STUBBED), stubs.called
import json
assert hasattr(json, "loads")
"""


def test_a_stub_imports_subclasses_annotates_and_raises_by_name_when_it_is_called() -> None:
    subprocess.run([sys.executable, "-P", "-c", PROGRAM], check=True)
