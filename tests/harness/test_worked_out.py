"""What is the same for every engine is worked out once: it is what it was, and it is not worked out again."""

import sys
from types import ModuleType

import msgspec
import msgspec.structs
import pytest

from eagletwin.harness.engines.sglang.boot import preimport


class Arguments(msgspec.Struct):
    """As SGLang's ServerArgs is."""

    steps: int
    topk: int = 1


class Configuration:
    """As transformers' is: its text is long, and takes long."""

    model_type = "llama"
    written = 0

    def __repr__(self) -> str:
        type(self).written += 1
        return "all of it"


@pytest.fixture
def shims(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is installed says, and is taken out again behind the test."""
    theirs = ModuleType("transformers.configuration_utils")
    monkeypatch.setattr(theirs, "PreTrainedConfig", Configuration, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setattr(sys.modules["transformers"], "configuration_utils", theirs, raising=False)
    monkeypatch.setitem(sys.modules, "transformers.configuration_utils", theirs)
    monkeypatch.setattr(Configuration, "__repr__", Configuration.__repr__)
    monkeypatch.setattr(msgspec.structs, "fields", msgspec.structs.fields)
    found: list[str] = []
    preimport.memoize(found)
    return found


def test_fields_of_a_class_are_those_that_msgspec_finds_and_are_found_once(shims: list[str]) -> None:
    found = msgspec.structs.fields(Arguments)
    assert [(field.name, field.type, field.default) for field in found] == [
        ("steps", int, msgspec.NODEFAULT),
        ("topk", int, 1),
    ]
    assert msgspec.structs.fields(Arguments) is found
    assert [field.name for field in msgspec.structs.fields(Arguments(1))] == ["steps", "topk"]
    with pytest.raises(TypeError):
        msgspec.structs.fields(int)
    assert "msgspec.structs.fields: what it finds is remembered" in shims


def test_a_configuration_that_is_read_is_not_written_down(shims: list[str]) -> None:
    assert f"Model config {Configuration()}" == "Model config Configuration of llama"
    assert Configuration.written == 0
    assert "transformers' PreTrainedConfig.__repr__: the class alone" in shims
