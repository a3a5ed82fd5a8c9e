"""Each module that is stubbed to save time: it raises by name, and the release still imports it, or it would be no use."""

import importlib.util
from pathlib import Path

import pytest

from eagletwin.cases.strategies import Focus
from eagletwin.harness.core.case import Request
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.sglang.stand_ins import stubs

# A model of transformers, of which none is named
NAMES = (*stubs.IDLE, "transformers.models.llama.modeling_llama")
# What one family's modules import alone: a recipe of it
OF_FAMILIES = {"transformers.masking_utils": "mimo-v2"}


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


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_FAMILIES])
def test_the_release_imports_it_and_the_trace_says_that_it_is_a_stub(busy_trace: Trace, name: str) -> None:
    assert f"{name}: a stub, which raises when it is called" in busy_trace.header.engine.shims


@pytest.mark.parametrize(("name", "recipe"), OF_FAMILIES.items())
def test_the_release_imports_it_for_a_family_and_the_engine_says_that_it_is_a_stub(host: Host, name: str, recipe: str) -> None:
    case = Focus(model=recipe).case("small", (Request(id="a", prompt=(7, 19), max_new_tokens=1),))
    assert f"{name}: a stub, which raises when it is called" in host.engine(case).info.shims
