"""What eagletwin uses of Hypothesis that is internal to it: a version that lacks it fails here."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from eagletwin.cases import sample_cases


def test_the_settings_of_a_test_are_where_the_plugin_changes_them() -> None:
    asked: list[int] = []

    @settings(max_examples=50, database=None)
    @given(st.integers())
    def test(number: int) -> None:
        asked.append(number)

    assert test.is_hypothesis_test  # type: ignore[attr-defined]
    drawn = test._hypothesis_internal_use_settings  # type: ignore[attr-defined]
    assert drawn.max_examples == 50
    test._hypothesis_internal_use_settings = settings(drawn, max_examples=3)  # type: ignore[attr-defined]
    test()
    assert len(asked) == 3


def test_the_numbers_that_hypothesis_finds_in_source_files_are_where_they_are_taken_from() -> None:
    assert callable(providers._get_local_constants)
    assert hasattr(providers.CONSTANTS_CACHE, "cache")
    assert not list(Constants().integers)


def test_a_version_that_finds_them_in_another_way_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(providers, "_get_local_constants")
    with pytest.warns(UserWarning, match="the same seed may draw other cases in another process"):
        sample_cases.draw_from_seeds_alone()


def test_no_profile_explains_which_lines_of_python_a_failing_case_ran() -> None:
    sample_cases.register()
    for name in ("dev", "ci", "nightly", "repro"):
        assert Phase.explain not in settings.get_profile(f"eagletwin-{name}").phases
