"""The pytest plugin: the fixture `eagletwin`, a marker, options, and failures that argue. Light: torch, Hypothesis
and the engine are imported when a test asks for the fixture.

    @given(case=cases())
    def test_the_draft_chain(eagletwin, case):
        eagletwin.check(case)
"""

import inspect
import os
import re
import sys
import unittest
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from eagletwin.harness.core.errors import EagletwinError, InputError
from eagletwin.harness.core.run_spec import DEFAULT_ENGINE, ENGINES, TITLES, Engine, chosen_engine
from eagletwin.harness.core.terminal import count

if TYPE_CHECKING:
    from eagletwin.harness.core.differs import Changes
    from eagletwin.harness.core.patch import Patch
    from eagletwin.harness.engines.source import Source

    from .twin import CaseFailed, Twin

_NO_SETTINGS = (
    "eagletwin does not find the settings of a test in this version of Hypothesis: they stay as they are, with a deadline that "
    "building an engine may exceed, and a test is not known to ask for fewer cases than --eagletwin-min-cases. Hypothesis "
    "6.135 to 6.170 are known."
)
_KERNELS = ("fast", "interpreter", "shadow", "checked")

_SOURCE: "pytest.StashKey[Source]" = pytest.StashKey()  # the release or tree that was named
_TWIN = pytest.StashKey["Twin"]()
_ASKED = pytest.StashKey[dict[str, Any]]()  # what the marker of the test that runs asks for
_CHANGES = pytest.StashKey[dict[str, "Changes"]]()  # what cases of such workers ran of what a source tree changes
_UNCHECKED = pytest.StashKey[set[str]]()
# Attributes of a report, which workers of pytest-xdist hand over: its line in the summary, and its annotation for GitHub.
_SUMMARY, _ANNOTATION = "eagletwin_summary", "eagletwin_annotation"


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)  # argparse says which option it was
    return number


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("eagletwin", "the EAGLE worker against a reference")
    group.addoption("--eagletwin-device", choices=["cpu", "cuda"], default="cpu", help="where it runs")
    group.addoption("--eagletwin-engine", choices=[*ENGINES], default=None, help=f"what runs, by default {DEFAULT_ENGINE}")
    for engine, facts in ENGINES.items():
        usual = "the installed one" if facts.installed else "the newest that is known"
        about = f"run this {facts.title}, not {usual}"
        group.addoption(f"--eagletwin-{engine}", metavar="RELEASE|PATH", default="", help=about)
    group.addoption(
        "--eagletwin-kernels",
        choices=_KERNELS,
        default="fast",
        help="what executes Triton kernels",
    )
    group.addoption(
        "--eagletwin-strict", action="store_true", help="fail where a changed statement of the tree or a patch did not run"
    )
    group.addoption(
        "--eagletwin-seconds",
        type=float,
        default=float("inf"),
        help="time that one test may spend on cases; the summary says how many it ran in it",
    )
    group.addoption(
        "--eagletwin-min-cases",
        type=_at_least_one,
        default=10,
        help="a test whose time was up before it ran as many cases fails (default 10; fewer if it asks for fewer)",
    )
    group.addoption("--eagletwin-out", type=Path, default=Path("eagletwin-runs"), help="folder for run folders of failures")
    group.addoption(
        "--eagletwin-profile", choices=["dev", "ci", "nightly", "repro"], help="load this Hypothesis profile of eagletwin's"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "eagletwin(revert=(), remedy=(), patches=(), kernels=None, without=(), idle_changes=False): how the `eagletwin` "
        "fixture runs cases in this test: fixes of the ledger to undo, candidate fixes of its live bugs to apply, patches to "
        "apply, what executes kernels, rules to leave out, and whether its cases may run nothing of what a source tree changes",
    )
    if config.getoption("--eagletwin-device") == "cuda":
        from eagletwin.harness.engines.machine import missing_for_cuda

        missing = missing_for_cuda()
        if missing is not None:
            error = InputError(missing[0], consequence="nothing was run: a CUDA engine needs it", remedy=missing[1])
            raise pytest.UsageError(f"--eagletwin-device cuda: {error}")
    try:
        engine, named = _engine(config)
    except InputError as error:
        raise pytest.UsageError(str(error)) from error
    if named or not ENGINES[engine].installed:
        from eagletwin.harness.engines.source import resolve

        try:
            config.stash[_SOURCE] = resolve(named, engine)  # workers of pytest-xdist find it fetched: the controller is first
        except EagletwinError as error:
            raise pytest.UsageError(f"--eagletwin-{engine} {named}: {error}") from error
    profile = config.getoption("--eagletwin-profile")
    if profile is not None:
        from hypothesis import settings

        from eagletwin.cases import sample_cases

        sample_cases.register()
        if profile == "ci":
            sample_cases.draw_from_seeds_alone()
        settings.load_profile(f"eagletwin-{profile}")


def _engine(config: pytest.Config) -> "tuple[Engine, str]":
    """The engine of the session, and its release or tree. Raises InputError for two engines."""
    named: dict[Engine, str] = {engine: config.getoption(f"--eagletwin-{engine}") for engine in ENGINES}
    return chosen_engine(config.getoption("--eagletwin-engine"), named, "--eagletwin-")


def named_source(config: pytest.Config) -> "Source":
    """The release or tree that an option names; else the installed one. For tests that import the engine in the process of
    pytest: engines/source.py puts it in place."""
    from eagletwin.harness.engines.source import INSTALLED

    return config.stash.get(_SOURCE, INSTALLED)


def pytest_report_header(config: pytest.Config) -> str:
    from eagletwin import __version__
    from eagletwin.harness.engines.source import init_file

    source = named_source(config)
    device, kernels = config.getoption("--eagletwin-device"), config.getoption("--eagletwin-kernels")
    return (
        f"eagletwin {__version__}: {TITLES[source.engine]} {source.called} ({init_file(source)}), {device}, kernels {kernels}"
    )


@pytest.fixture(scope="session")
def eagletwin(request: pytest.FixtureRequest) -> "Generator[Twin]":
    """check(case) runs a case on the real worker and fails unless it is equal; start(case) plays one step by step.

    One per test process: it holds one process with the engine imported (some 0.6 GB), and up to eight engines (0.05 GB each),
    one for each engine configuration, those used last.
    """
    from msgspec.structs import replace

    from eagletwin.harness.core.run_spec import CPU
    from eagletwin.harness.engines.source import resolve

    from .twin import Twin

    config = request.config
    mode = replace(CPU, engine=_engine(config)[0])
    if config.getoption("--eagletwin-device") == "cuda":
        mode = replace(mode, device="cuda", graphs=(1, 2, 4), overlap=True, gpu=gpu_of_worker())
    twin = Twin(
        config.getoption("--eagletwin-out"),
        source=config.stash.get(_SOURCE, None) or resolve(""),
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
    begun = item.config.stash[_ASKED] = _marker_options(item)
    twin = item.config.stash.get(_TWIN, None)
    if twin is not None:
        twin.begin(**begun)


_IDLE_CHANGES = "If that is as it should be: @pytest.mark.eagletwin(idle_changes=True)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that passed must have run a case, and enough of them, and judged the end of each that it played."""
    result = None
    try:
        result = yield
    except unittest.SkipTest as error:
        twin = item.config.stash.get(_TWIN, None)
        if twin is not None and str(error).startswith("Hypothesis has been told"):  # to run nothing, and has nothing to replay
            _require_replay(item, twin)
        raise
    except Exception as error:
        twin = item.config.stash.get(_TWIN, None)
        if twin is None or not twin.late or not _is_exhausted(error):
            raise
        _must_have_run_enough(item, twin)
        if _max_examples(item) is None:  # what Hypothesis ran is a part of the test, and the rest of it was not run
            raise
    twin = item.config.stash.get(_TWIN, None)
    if twin is not None:
        _must_have_run_enough(item, twin)
        _require_replay(item, twin)
        _require_finish(twin)
        _require_comparison(item, twin)
        if twin.unrun:
            pytest.fail(f"eagletwin: cannot tell, of any case of this test: {twin.unrun}. {_IDLE_CHANGES}", pytrace=False)
    return result


def _is_exhausted(error: Exception) -> bool:
    """Whether Hypothesis gave up because too many cases were rejected, as all are when a test's time is up."""
    hypothesis = sys.modules.get("hypothesis")
    return hypothesis is not None and isinstance(error, hypothesis.errors.FailedHealthCheck | hypothesis.errors.Unsatisfiable)


def _must_have_run_enough(item: pytest.Item, twin: "Twin") -> None:
    """Fail the test if its time was up before it had run enough cases."""
    least, cases = item.config.getoption("--eagletwin-min-cases"), _max_examples(item)
    if cases is not None:
        least = min(least, cases)
    if twin.late and twin.looked < least:
        seconds = item.config.getoption("--eagletwin-seconds")
        error = InputError(
            f"{_number_ran(item, twin)} ran before --eagletwin-seconds {seconds:g} was up, and {least} must",
            consequence="nothing is known of the cases that were not run, so the test fails",
            remedy="give it more seconds, or a lower --eagletwin-min-cases",
        )
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def _require_replay(item: pytest.Item, twin: "Twin") -> None:
    """Fail the test if it was to run only what failed before, and that is nothing."""
    drawn = _settings(item)
    if drawn is None or twin.looked or "eagletwin" not in getattr(item, "fixturenames", ()):
        return
    from hypothesis import Phase

    if Phase.generate not in drawn.phases:
        error = InputError(
            "nothing was run: Hypothesis was to run only what failed before, and has nothing stored of this test",
            consequence="nothing is known of it, so the test fails",
            remedy="choose tests that failed here under --eagletwin-profile dev or nightly (-k, or --lf), or another profile",
        )
        raise pytest.fail.Exception(str(error), pytrace=False)


def _require_finish(twin: "Twin") -> None:
    """Fail the test if it began to play a case and left it."""
    for name in twin.unfinished:
        error = InputError(
            f"case {name} was started and never finished",
            consequence="each step was judged and the end was not, so the test fails",
            remedy="call finish(): it runs the case to its end and judges the whole",
        )
        raise pytest.fail.Exception(str(error), pytrace=False)


def _require_comparison(item: pytest.Item, twin: "Twin") -> None:
    """Fail the test if it has the fixture among its arguments and gave it no case. What asks for it through a fixture of its
    own may use it otherwise: that one is not looked at."""
    function = _function(item)  # a doctest has none
    if twin.looked or twin.refused or not callable(function) or "eagletwin" not in inspect.signature(function).parameters:
        return
    error = InputError(
        "this test asks for the fixture eagletwin, and no case was run",
        consequence="nothing was compared, so the test fails",
        remedy="call eagletwin.check(case), or take eagletwin out of its arguments",
    )
    raise pytest.fail.Exception(str(error), pytrace=False)


def _function(item: pytest.Item) -> Any:
    """The function of a test; Hypothesis leaves its settings there."""
    return getattr(getattr(item, "obj", None), "__func__", getattr(item, "obj", None))


def _settings(item: pytest.Item) -> Any:
    """The settings that Hypothesis runs a test with, an attribute internal to it; None: it has none."""
    return getattr(_function(item), "_hypothesis_internal_use_settings", None)


def _max_examples(item: pytest.Item) -> int | None:
    """How many cases Hypothesis is to draw for a test; None: it does not run the test."""
    drawn = _settings(item)
    return None if drawn is None else drawn.max_examples


def _marker_options(item: pytest.Item) -> dict[str, Any]:
    """What the test's marker asks for, as Twin.begin takes it. What cannot be had fails this test, and no other."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", item.name).strip("-._")[:64] or "case"
    markers = list(item.iter_markers("eagletwin"))
    if not markers:
        return {"name": name}
    from eagletwin.cases.ledger import patches_of
    from eagletwin.harness.judge.rules import rules_off

    options = markers[0].kwargs  # the closest
    try:
        for marker in markers:
            _understood(marker)
        names = {name: [str(number) for number in options.get(name, ())] for name in ("revert", "remedy")}
        patches = patches_of(names["revert"], names["remedy"], None, _engine(item.config)[0])
        patches += tuple(_patch(item.path.parent, patch) for patch in options.get("patches", ()))
        off = rules_off(list(options.get("without", ())))
        idle = {"idle_changes": bool(options.get("idle_changes", False))}
    except InputError as error:
        raise pytest.fail.Exception(f"error: marker of {item.nodeid}: {error}", pytrace=False) from None
    return {"name": name, "patches": patches, "kernels": options.get("kernels"), "without": off} | idle


def _understood(marker: pytest.Mark) -> None:
    """Raise InputError for a marker that would change nothing, or that names what does not exist."""
    lists, kernels = ("revert", "remedy", "patches", "without"), marker.kwargs.get("kernels")
    wrong = [repr(value) for value in marker.args] + sorted(set(marker.kwargs) - {*lists, "kernels", "idle_changes"})
    mistake = f"it takes revert, remedy, patches, kernels, without, idle_changes; not {wrong[0]}" if wrong else ""
    for name in lists:
        if not isinstance(marker.kwargs.get(name, ()), list | tuple | set | frozenset):
            mistake = mistake or f"{name} is not a list, but {marker.kwargs[name]!r}"
    if kernels is not None and kernels not in _KERNELS:
        mistake = mistake or f"kernels is {kernels!r}, and not one of {', '.join(_KERNELS)}"
    if mistake:
        raise InputError(mistake, consequence="nothing was run", remedy="@pytest.mark.eagletwin(revert=[25015]) undoes a fix")


def _patch(folder: Path, patch: object) -> "Patch":
    """A patch of a marker: a Patch, or a file that holds one, by its path from the folder of the test."""
    from eagletwin.harness.core.patch import Patch, read_patch

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
    """Take Hypothesis' clock off tests of the worker, as a case may have to wait for an engine, and its explanations, which
    know lines of Python and none of a worker."""
    for item in items:
        function = _function(item)
        if not getattr(function, "is_hypothesis_test", False) or "eagletwin" not in getattr(item, "fixturenames", ()):
            continue
        from hypothesis import HealthCheck, settings

        from eagletwin.cases.sample_cases import without_explain

        drawn = _settings(item)
        if drawn is None:
            item.warn(pytest.PytestWarning(_NO_SETTINGS))
            continue
        quiet = {*drawn.suppress_health_check, HealthCheck.too_slow, HealthCheck.data_too_large}
        function._hypothesis_internal_use_settings = settings(
            drawn, deadline=None, suppress_health_check=list(quiet), phases=without_explain(drawn.phases)
        )


def _failure(error: BaseException | None) -> "CaseFailed | None":
    """The failed case in an exception, or in those that Hypothesis groups in it."""
    from .twin import CaseFailed

    if error is None or isinstance(error, CaseFailed):
        return error
    inside = [*getattr(error, "exceptions", ()), error.__cause__]
    return next((found for found in map(_failure, inside) if found is not None), None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Conclude what a test failed on, and add it to the report: one line for pytest's summary, and the argument once."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, EagletwinError):
        _summarize(report, f"{type(error).__name__}: {error.cause}")
    twin = item.config.stash.get(_TWIN, None)
    if twin is None:
        return report
    failed = _failure(error)
    if call.when == "call" and twin.late:
        setattr(report, _SUMMARY, _ran(item, twin, failed is not None))
    if failed is not None:
        from .twin import conclude

        concluded = conclude(twin, failed)
        _summarize(report, f"CaseFailed: {concluded.line}")
        if hasattr(report.longrepr, "addsection"):
            report.longrepr.addsection("eagletwin", concluded.text)
        else:
            report.sections.append(("eagletwin", concluded.text))
        # JUnit XML has those of the item as they are when its test is torn down
        item.user_properties += [(f"eagletwin.{name}", value) for name, value in concluded.properties]
        setattr(report, _ANNOTATION, concluded.annotation(item.path, (item.location[1] or 0) + 1, item.name))
    return report


def _summarize(report: pytest.TestReport, line: str) -> None:
    """What pytest's summary says: not the exception's module, which would be all that 80 columns show."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = line


def _ran(item: pytest.Item, twin: "Twin", found: bool) -> str:
    """The summary's line of a test whose time was up."""
    cases, seconds = _max_examples(item), item.config.getoption("--eagletwin-seconds")
    ran = count(twin.looked, "case") if found else _number_ran(item, twin)
    smaller = "; what it found may not be the smallest" if found and cases is not None else ""
    return f"{item.nodeid} ran {ran}: --eagletwin-seconds {seconds:g} was up{smaller}"


def _number_ran(item: pytest.Item, twin: "Twin") -> str:
    cases = _max_examples(item)
    return count(twin.looked, "case") if cases is None else f"{twin.looked} of {count(cases, 'case')}"


def pytest_runtest_teardown(item: pytest.Item) -> None:
    twin = item.config.stash.get(_TWIN, None)
    if twin is not None:
        twin.end()


def pytest_sessionfinish(session: pytest.Session) -> None:
    twin = session.config.stash.get(_TWIN, None)
    output = getattr(session.config, "workeroutput", None)  # there in a worker of pytest-xdist
    if twin is not None and output is not None:
        import msgspec

        output["eagletwin_unchecked"] = sorted(twin.unchecked)
        output["eagletwin_changes"] = msgspec.to_builtins(twin.changes)
    strict, changes = session.config.getoption("--eagletwin-strict"), _changes(session.config)
    unseen = any(one.headline for one in changes.values()) if strict else False
    if output is None and session.exitstatus == pytest.ExitCode.OK and (unseen or _doubt(changes)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist is done."""
    output = getattr(node, "workeroutput", {})
    if "eagletwin_changes" in output:
        import msgspec

        from eagletwin.harness.core.differs import Changes

        total = node.config.stash.setdefault(_CHANGES, {})
        for patch, changes in msgspec.convert(output["eagletwin_changes"], dict[str, Changes]).items():
            total.setdefault(patch, Changes()).update(changes)
    node.config.stash.setdefault(_UNCHECKED, set()).update(output.get("eagletwin_unchecked", ()))


def _changes(config: pytest.Config) -> "dict[str, Changes]":
    """What the cases of this process, or of its workers, ran of what a source tree and patches change."""
    twin = config.stash.get(_TWIN, None)
    return twin.changes if twin is not None else config.stash.get(_CHANGES, {})


def _doubt(changes: "dict[str, Changes]") -> str:
    """Why the session says nothing about the source tree; "" if it does."""
    return changes[""].doubt if "" in changes else ""


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            line = getattr(report, _SUMMARY, "")
            if line:
                terminalreporter.write_line(f"eagletwin: {line}")
            note = getattr(report, _ANNOTATION, "") if os.environ.get("GITHUB_ACTIONS") == "true" else ""
            if note:
                terminalreporter.write_line(note)
    twin = config.stash.get(_TWIN, None)
    unchecked = config.stash.get(_UNCHECKED, set()) | (twin.unchecked if twin is not None else set())
    if unchecked:
        names = "; ".join(sorted(unchecked))
        terminalreporter.write_line(f"eagletwin: not checked by kernel.*, since Triton's interpreter ran it: {names}")
    changes = _changes(config)
    for one in changes.values():
        if one.headline:
            terminalreporter.write_line(f"eagletwin: NOT SEEN  {one.headline}", yellow=True)
    for line in changes[""].lines if "" in changes else ():
        terminalreporter.write_line(f"eagletwin: {line}")
    if _doubt(changes):
        terminalreporter.write_line("eagletwin: no case ran any of that, so this session says nothing about it", red=True)
