"""Options of this test suite: which tests run (`--quick`, `--long`), and which may be skipped (`--known-skips`)."""

import atexit
import faulthandler
import gc
import os
import re
import sys
import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tests of eagletwin")
    group.addoption("--quick", action="store_true", help="Leave out tests marked slow; SGLang cannot be imported.")
    group.addoption("--long", action="store_true", help="Run the tests marked long alone. Without it they run by name only.")
    group.addoption(
        "--known-skips",
        metavar="FILE",
        type=Path,
        help="Fail if a test is skipped that FILE does not name, or if a line of FILE names no skipped test.",
    )


STDERR = pytest.StashKey[int]()  # a file descriptor that pytest catches nothing of
HANGS = 900  # seconds after which a test ends its process, with the stacks of all threads, and so fails by name


# pytest's faulthandler_timeout would not do: a session of pytest in a fork waits for ever for its thread, which a fork lacks.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    watch = threading.Timer(HANGS, _end, [item.config.stash[STDERR]])
    watch.daemon = True
    watch.start()
    try:
        return (yield)
    finally:
        watch.cancel()


def _end(stderr: int) -> None:
    faulthandler.dump_traceback(stderr)
    os._exit(1)


@pytest.hookimpl(trylast=True)  # the reporter that the plugin below writes with is there by then
def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)
    if config.getoption("--quick"):
        sys.modules["sglang"] = None  # type: ignore[assignment]  # a test that imports it fails at once
    file = config.getoption("--known-skips")
    if file is not None and not hasattr(config, "workerinput"):  # xdist: the controller sees the reports of all workers
        config.pluginmanager.register(Skips(file))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live to the end: looking through them for garbage takes a worker seconds, now and while tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()  # what is garbage now is none of it
        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules complain of what is left of them when Python ends
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def runs(item: pytest.Item) -> bool:
        if config.getoption("--long"):
            return item.get_closest_marker("long") is not None
        return not (item.get_closest_marker("long") or (config.getoption("--quick") and item.get_closest_marker("slow")))

    named = any("::" in argument for argument in config.args)
    left_out = [] if named else [item for item in items if not runs(item)]
    if left_out:
        items[:] = [item for item in items if runs(item)]
        config.hook.pytest_deselected(items=left_out)


@dataclass(frozen=True)
class Known:
    """A line of the list of known skips: `TESTS  REASON`, in both of which `*` stands for anything."""

    line: str

    def names(self, test: str, reason: str) -> bool:
        tests, _, why = self.line.partition("  ")
        return _fits(tests, test) and _fits(why.strip(), reason)


def _fits(pattern: str, text: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), text, re.DOTALL) is not None


class Skips:
    """Compares the tests that were skipped with those that a file names. What it finds makes the run fail."""

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text(encoding="utf-8").splitlines()
        self.known = [Known(line.rstrip()) for line in lines if line.strip() and not line.startswith("#")]
        self.seen: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look(report)

    def _look(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
            self.seen.append((report.nodeid, why.removeprefix("Skipped: ")))

    def found(self) -> list[str]:
        """What differs from the file, a line each."""
        unknown = [skip for skip in self.seen if not any(known.names(*skip) for known in self.known)]
        stale = [known.line for known in self.known if not any(known.names(*skip) for skip in self.seen)]
        return [
            *(f"skipped, and {self.file} does not name it: {test}  {why}" for test, why in unknown),
            *(f"{self.file} names it, and no such test was skipped: {line}" for line in stale),
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.found() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if found := self.found():
            terminalreporter.section("skips", sep="=", red=True)
            for line in found:
                terminalreporter.line(line, red=True)
