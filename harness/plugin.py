"""The pytest plugin: the fixture `eagletwin`, a marker, options, and failures that argue. Light: SGLang, torch and Hypothesis
are imported when a test asks for the fixture.

    @given(case=cases())
    def test_the_draft_chain(eagletwin, case):
        eagletwin.check(case)
"""

import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .errors import EagletwinError, InputError
from .words import count

if TYPE_CHECKING:
    from .engines.source import Source
    from .patch import Patch
    from .twin import CaseFailed, Twin

_KERNELS = ("fast", "interpreter", "shadow", "checked")

_SOURCE: "pytest.StashKey[Source]" = pytest.StashKey()  # the SGLang that was named
_TWIN = pytest.StashKey["Twin"]()
_ASKED = pytest.StashKey[dict[str, Any]]()  # what the marker of the test that runs asks for
_SKIPPED = pytest.StashKey[int]()  # cases that workers of pytest-xdist did not run


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("eagletwin", "SGLang's EAGLE worker against a reference")
    group.addoption("--eagletwin-engine", choices=["sglang"], default="sglang", help="whose worker runs")
    group.addoption("--eagletwin-device", choices=["cpu", "cuda"], default="cpu", help="where it runs")
    group.addoption("--eagletwin-sglang", metavar="RELEASE|PATH", default="", help="run this SGLang, not the installed one")
    group.addoption(
        "--eagletwin-kernels",
        choices=_KERNELS,
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
    named = config.getoption("--eagletwin-sglang")
    if named:
        from .engines.source import resolve

        try:
            config.stash[_SOURCE] = resolve(named)  # workers of pytest-xdist find it fetched: their controller comes first
        except EagletwinError as error:
            raise pytest.UsageError(f"--eagletwin-sglang {named}: {error}") from error
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

    from .engines.source import INSTALLED

    sglang = config.stash.get(_SOURCE, INSTALLED).called
    device, kernels = config.getoption("--eagletwin-device"), config.getoption("--eagletwin-kernels")
    return f"eagletwin {__version__}: SGLang {sglang}, {device}, kernels {kernels}"


@pytest.fixture(scope="session")
def eagletwin(request: pytest.FixtureRequest) -> "Generator[Twin]":
    """check(case) runs a case on the real worker and fails unless it is equal; start(case) plays one step by step.

    One per test process: it holds one process that has SGLang imported (some 0.6 GB), and up to eight engines (0.05 GB each),
    one for each engine configuration, those used last.
    """
    from .engines.mode import CPU, Mode
    from .engines.source import INSTALLED
    from .twin import Twin

    config = request.config
    mode = CPU
    if config.getoption("--eagletwin-device") == "cuda":
        from .doctor import missing_for_cuda

        missing = missing_for_cuda()
        if missing is not None:
            pytest.skip(f"--eagletwin-device cuda: {missing[0]}; {missing[1]}")
        mode = Mode(device="cuda", graphs=(1, 2, 4), overlap=True, gpu=gpu_of_worker())
    twin = Twin(
        config.getoption("--eagletwin-out"),
        source=config.stash.get(_SOURCE, INSTALLED),
        mode=mode,
        kernels=config.getoption("--eagletwin-kernels"),
        seconds=config.getoption("--eagletwin-seconds"),
    )
    config.stash[_TWIN] = twin
    twin.begin(**config.stash[_ASKED])
    yield twin
    twin.close()


def gpu_of_worker() -> int:
    """The GPU of this process: workers of pytest-xdist take turns."""
    import torch

    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return int(worker.removeprefix("gw")) % torch.cuda.device_count()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture of the test: what one of them checks is checked as the test's marker says."""
    asked = item.config.stash[_ASKED] = _asked(item)
    twin = item.config.stash.get(_TWIN, None)
    if twin is not None:
        twin.begin(**asked)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    result = yield
    twin = item.config.stash.get(_TWIN, None)
    if twin is not None and twin.only_skipped:
        pytest.skip("eagletwin: no case was run, because the test's time was up")
    return result


def _asked(item: pytest.Item) -> dict[str, Any]:
    """What the test's marker asks for, as Twin.begin takes it. What cannot be had fails this test, and no other."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", item.name).strip("-._")[:64] or "case"
    markers = list(item.iter_markers("eagletwin"))
    if not markers:
        return {"name": name}
    from .cli_options import patches_of, rules_off

    asked = markers[0].kwargs  # the closest
    try:
        for marker in markers:
            _understood(marker)
        patches = patches_of([str(number) for number in asked.get("revert", ())], None, None)
        patches += tuple(_patch(item.path.parent, patch) for patch in asked.get("patches", ()))
        off = rules_off(list(asked.get("without", ())))
    except InputError as error:
        raise pytest.fail.Exception(f"error: marker of {item.nodeid}: {error}", pytrace=False) from None
    return {"name": name, "patches": patches, "kernels": asked.get("kernels"), "without": off}


def _understood(marker: pytest.Mark) -> None:
    """Raise InputError for a marker that would change nothing, or that names what there is not."""
    lists, kernels = ("revert", "patches", "without"), marker.kwargs.get("kernels")
    wrong = [repr(value) for value in marker.args] + sorted(set(marker.kwargs) - {*lists, "kernels"})
    told = f"it takes revert, patches, kernels, without; not {wrong[0]}" if wrong else ""
    for name in lists:
        if not isinstance(marker.kwargs.get(name, ()), list | tuple | set | frozenset):
            told = told or f"{name} is no list, but {marker.kwargs[name]!r}"
    if kernels is not None and kernels not in _KERNELS:
        told = told or f"kernels is {kernels!r}, and none of {', '.join(_KERNELS)}"
    if told:
        raise InputError(told, consequence="nothing was run", remedy="@pytest.mark.eagletwin(revert=[25015]) undoes a fix")


def _patch(folder: Path, patch: object) -> "Patch":
    """A patch of a marker: a Patch, or a file that holds one, by its path from the folder of the test."""
    from .patch import Patch, read_patch

    if isinstance(patch, Patch):
        return patch
    if not isinstance(patch, str | Path):
        raise InputError(
            f"patches has a {type(patch).__name__}",
            consequence="nothing was run",
            remedy="give patch files or Patch objects",
        )
    return read_patch(folder / patch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take Hypothesis' clock off tests of the worker: a case may have to wait for an engine."""
    for item in items:
        function = getattr(getattr(item, "obj", None), "__func__", getattr(item, "obj", None))
        drawn = getattr(function, "_hypothesis_internal_use_settings", None)
        if drawn is not None and "eagletwin" in getattr(item, "fixturenames", ()):
            from hypothesis import HealthCheck, settings

            quiet = {*drawn.suppress_health_check, HealthCheck.too_slow, HealthCheck.data_too_large}
            unhurried = settings(drawn, deadline=None, suppress_health_check=list(quiet))
            function._hypothesis_internal_use_settings = unhurried  # type: ignore[union-attr]


def _failure(error: BaseException | None) -> "CaseFailed | None":
    """The failed case in an exception, or in those that Hypothesis groups in it."""
    from .twin import CaseFailed

    if error is None or isinstance(error, CaseFailed):
        return error
    inside = [*getattr(error, "exceptions", ()), error.__cause__]
    return next((found for found in map(_failure, inside) if found is not None), None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Conclude what a test failed on, and add it to the report."""
    report = yield
    twin = item.config.stash.get(_TWIN, None)
    if twin is None or call.excinfo is None:
        return report
    failed = _failure(call.excinfo.value)
    if failed is not None:
        outcome = twin.conclude(failed)
        report.sections.append(("eagletwin", f"{outcome.report}\n  folder: {outcome.folder}"))
    return report


def pytest_runtest_teardown(item: pytest.Item) -> None:
    twin = item.config.stash.get(_TWIN, None)
    if twin is not None:
        twin.end()


def pytest_sessionfinish(session: pytest.Session) -> None:
    twin = session.config.stash.get(_TWIN, None)
    output = getattr(session.config, "workeroutput", None)  # there in a worker of pytest-xdist
    if twin is not None and output is not None:
        output["eagletwin_skipped"] = twin.skipped


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist is done."""
    skipped = getattr(node, "workeroutput", {}).get("eagletwin_skipped", 0)
    node.config.stash[_SKIPPED] = node.config.stash.get(_SKIPPED, 0) + skipped


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    twin = config.stash.get(_TWIN, None)
    skipped = config.stash.get(_SKIPPED, 0) + (twin.skipped if twin is not None else 0)
    if skipped:
        terminalreporter.write_line(f"eagletwin: {count(skipped, 'case')} not run, because the time of their test was up")
