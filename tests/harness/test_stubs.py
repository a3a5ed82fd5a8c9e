"""Stubs import, and never return: a kernel that silently did nothing would pass for one that ran."""

import subprocess
import sys

PROGRAM = """
import importlib, sys
from eagletwin.harness.engines.sglang.stand_ins import stubs
stubs.install()
for name in stubs.GPU:
    module = importlib.import_module(name)
    deeper = importlib.import_module(f"{name}.some.thing")
    assert deeper.__name__ == f"{name}.some.thing"
    class Child(module.Base): pass
    def annotated(x: module.Type | None) -> "None": ...
    assert isinstance(Child(), Child) and not isinstance(1, module.Base)
    for call in (module.function, module.Class.method, deeper.op):
        try:
            call(1)
        except stubs.StubCalled as error:
            assert name in str(error) and "<string>" in str(error), error
        else:
            raise AssertionError(f"{name} returned")
assert len(stubs.called) == 3 * len(stubs.GPU), stubs.called
import json
assert hasattr(json, "loads")
"""

ONE_MODULE = """
import importlib, sys
from eagletwin.harness.engines.sglang.stand_ins import stubs
sys.meta_path.insert(0, stubs.StubFinder(gpu=(), idle=("json.tool", "xml.sax", "absent", "xml.absent")))
import json.decoder, xml.dom
from json.tool import main
from xml.sax.handler import ContentHandler
class Child(ContentHandler): pass
assert json.loads("1") == 1 and xml.dom.Node.ELEMENT_NODE == 1
for call, name in ((main, "json.tool.main"), (ContentHandler, "xml.sax.handler.ContentHandler")):
    try:
        call()
    except stubs.StubCalled as error:
        assert str(error).startswith(f"{name} was called at <string>"), error
    else:
        raise AssertionError(f"{name} returned")
for name in ("absent", "xml.absent"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        pass
    else:
        raise AssertionError(f"{name} was found")
"""


def test_a_stub_imports_subclasses_annotates_and_raises_by_name_when_it_is_called() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_an_idle_module_is_stubbed_by_its_full_name_with_all_below_it_and_only_where_it_exists() -> None:
    subprocess.run([sys.executable, "-c", ONE_MODULE], check=True)
