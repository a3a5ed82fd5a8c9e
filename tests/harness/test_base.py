"""With which SGLang a changed one is compared, so that a remedy hides nothing of the change."""

from types import SimpleNamespace
from typing import Any

import pytest

from eagletwin.harness.check import trials
from eagletwin.harness.core.files import installed
from eagletwin.harness.core.run_spec import DEFAULT_RUN
from eagletwin.harness.engines.provision import NotFetched
from eagletwin.harness.engines.source import INSTALLED, Source, at_hand


def of(version: str) -> trials.Base | None:
    def beside(source: Source) -> Any:
        return SimpleNamespace(source=source)

    host: Any = SimpleNamespace(source=Source("/a/tree", version=version), beside=beside)
    return trials.base_of(host, DEFAULT_RUN)


@pytest.mark.parametrize("version", [f"{installed('sglang')}+dirty.12345678", "1a2b3c4d5e", "1a2b3c4d5e+dirty.1", "tree-0"])
def test_a_changed_tree_is_compared_with_its_release_or_with_the_installed_one(version: str) -> None:
    found = of(version)
    assert found is not None
    assert found.called == f"SGLang {installed('sglang')}"
    assert found.run.sglang == ""


def test_a_copy_of_a_release_is_that_release() -> None:
    assert of(installed("sglang")) is None


def test_a_release_that_is_not_at_hand_or_damaged_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(_release: str) -> Source:
        raise NotFetched("cause", consequence="c", remedy="r")

    monkeypatch.setattr(trials, "at_hand", lambda _: None)
    assert of("0.5.22+dirty.1") is None
    monkeypatch.setattr(trials, "at_hand", damaged)
    assert of("0.5.22+dirty.1") is None


def test_the_installed_release_is_at_hand_and_an_unknown_one_is_not() -> None:
    assert at_hand(installed("sglang")) == INSTALLED
    assert at_hand("0.0.1") is None
