"""Each module that is stubbed to save time raises by name, and each trace lists them all."""

import importlib.util
from pathlib import Path

import pytest

from eagletwin.cases.strategies import Focus
from eagletwin.harness.core.case import Request
from eagletwin.harness.core.records import EngineInfo
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.sglang.stand_ins import stubs

# A model of transformers, of which none is named
NAMES = (*stubs.IDLE, "transformers.models.llama.modeling_llama")


def search_path(name: str) -> list[str] | None:
    """Where the parent of a module looks for it; found without importing SGLang in this process."""
    top, *middle = name.split(".")[:-1] or [""]
    spec = importlib.util.find_spec(top) if top else None
    return [str(Path(folder, *middle)) for folder in spec.submodule_search_locations or ()] if spec is not None else None


@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_anything_in_it_raises_by_name(name: str) -> None:
    spec = stubs.StubFinder().find_spec(name, search_path(name))
    assert spec is not None, f"{name} does not exist any more: take it from the list"
    module = importlib.util.module_from_spec(spec)
    for call in (module.function, module.Class.method):
        with pytest.raises(stubs.StubCalled, match=rf"^{name}\.\w+(\.method)? was called at .*test_stubs\.py:"):
            call(1)


def test_a_trace_lists_them_whatever_its_process_has_served_before(busy_trace: Trace, host: Host) -> None:
    case = Focus(model="mimo-v2").case("small", (Request(id="a", prompt=(7, 19), max_new_tokens=1),))
    shims = {*stubs.GPU, *stubs.IDLE, "transformers.models.*.modeling_*"}
    assert {f"{name}: a stub, which raises when it is called" for name in shims} <= {*stubbed(busy_trace.header.engine)}
    assert stubbed(host.engine(case).info) == stubbed(busy_trace.header.engine)


def stubbed(engine: EngineInfo) -> list[str]:
    return [shim for shim in engine.shims if shim.endswith(": a stub, which raises when it is called")]
