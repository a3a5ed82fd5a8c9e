"""The pytest plugin: the fixture `eagletwin`, a marker, options, and failures that argue. Light: SGLang, torch and Hypothesis
are imported when a test asks for the fixture.

    @given(case=cases())
    def test_the_draft_chain(eagletwin, case):
        eagletwin.check(case)
"""

import re
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .twin import Twin

_TWIN = pytest.StashKey["Twin"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("eagletwin", "SGLang's EAGLE worker against a reference")
    group.addoption("--eagletwin-engine", choices=["sglang"], default="sglang", help="whose worker runs")
    group.addoption("--eagletwin-device", choices=["cpu"], default="cpu", help="where it runs")
    group.addoption("--eagletwin-sglang", metavar="RELEASE", help="refuse to run on any other release than this")
    group.addoption(
        "--eagletwin-kernels",
        choices=["fast", "interpreter", "shadow", "checked"],
        default="fast",
        help="what executes Triton kernels",
    )
    group.addoption(
        "--eagletwin-seconds",
        type=float,
        default=float("inf"),
        help="time that one test may spend on cases; those after it are not run, and counted in the summary",
    )
    group.addoption("--eagletwin-out", type=Path, default=Path("eagletwin-runs"), help="folder for run folders of failures")
    group.addoption(
        "--eagletwin-profile", choices=["dev", "ci", "nightly", "repro"], help="load this Hypothesis profile of eagletwin's"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "eagletwin(revert=(), patches=(), kernels=None, without=()): how the `eagletwin` fixture runs cases in this test: "
        "fixes of the ledger to undo, patches to apply, what executes kernels, rules to leave out",
    )
    wanted = config.getoption("--eagletwin-sglang")
    if wanted is not None:
        from .versions import installed

        if installed("sglang") != wanted:
            raise pytest.UsageError(f"--eagletwin-sglang {wanted}: SGLang {installed('sglang')} is installed; nothing was run")
    profile = config.getoption("--eagletwin-profile")
    if profile is not None:
        from hypothesis import settings

        from eagletwin.cases import profiles

        profiles.register()
        if profile == "ci":
            profiles.draw_from_seeds_alone()
        settings.load_profile(f"eagletwin-{profile}")


def pytest_report_header(config: pytest.Config) -> str:
    from eagletwin import __version__

    from .versions import installed

    return f"eagletwin {__version__}: SGLang {installed('sglang')}, cpu, kernels {config.getoption('--eagletwin-kernels')}"


@pytest.fixture(scope="session")
def eagletwin(request: pytest.FixtureRequest) -> "Generator[Twin]":
    """check(case) runs a case on the real worker and fails unless it is equal; start(case) plays one step by step.

    One per test process: it holds one process that has SGLang imported (some 0.6 GB), and up to eight engines (0.05 GB each),
    one for each engine configuration, those used last.
    """
    from .twin import Twin

    config = request.config
    twin = Twin(
        config.getoption("--eagletwin-out"),
        kernels=config.getoption("--eagletwin-kernels"),
        seconds=config.getoption("--eagletwin-seconds"),
    )
    config.stash[_TWIN] = twin
    _begin(twin, request.node.items[0] if getattr(request.node, "items", None) else None)
    yield twin
    twin.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    twin = item.config.stash.get(_TWIN, None)
    if twin is not None:
        _begin(twin, item)
    return (yield)


def _begin(twin: "Twin", item: pytest.Item | None) -> None:
    """Take over what the test's marker says."""
    if item is None:
        return
    marker = item.get_closest_marker("eagletwin")
    asked = dict(marker.kwargs) if marker is not None else {}
    patches = tuple(asked.get("patches", ()))
    if asked.get("revert"):
        from eagletwin.cases.regressions import LEDGER

        patches = tuple(LEDGER[str(number)].revert for number in asked["revert"]) + patches
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", item.name).strip("-.")[:64] or "case"
    twin.begin(name, patches=patches, kernels=asked.get("kernels"), without=frozenset(asked.get("without", ())))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Conclude what a test failed on, and add it to the report."""
    report = yield
    twin = item.config.stash.get(_TWIN, None)
    if twin is None or call.excinfo is None:
        return report
    from .twin import CaseFailed

    failed = call.excinfo.value
    if isinstance(failed, CaseFailed):
        outcome = twin.conclude(failed)
        report.sections.append(("eagletwin", f"{outcome.report}\n  folder: {outcome.folder}"))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    twin = config.stash.get(_TWIN, None)
    if twin is not None and twin.skipped:
        terminalreporter.write_line(f"eagletwin: {twin.skipped} cases were not run, because the time of their test was up")
