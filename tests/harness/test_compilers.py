"""A limit does not count the time in which a compiler runs: a worker that compiles a kernel is not ended for it."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Ending
from eagletwin.harness.engines import compilers, protocol
from eagletwin.harness.engines.host import WouldNotStart
from eagletwin.harness.engines.sglang.processes.supervise import Runner, supervise

CASE = Case(name="a", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that does not end, by a name that no compiler of a test has that runs beside this one."""
    program = tmp_path / f"slow-{os.getpid()}"
    program.write_text("#!/bin/sh\nread never\n")  # in the shell itself: a child would have its name for a moment
    program.chmod(0o755)
    monkeypatch.setattr(compilers, "_COMPILERS", frozenset({program.name}))
    for module in (compilers, supervise.__globals__):
        target = module if isinstance(module, dict) else vars(module)
        monkeypatch.setitem(target, "LOOK_SECONDS", 0.1)
    return program


@contextmanager
def compiling(program: Path, *, session: bool = False) -> Iterator[None]:
    with subprocess.Popen(program, stdin=subprocess.PIPE, start_new_session=session) as process:
        while Path(f"/proc/{process.pid}/comm").read_text() != f"{program.name}\n":
            time.sleep(0.01)
        try:
            yield
        finally:
            process.kill()


def test_a_compiler_is_seen_in_its_own_session_while_it_runs(compiler: Path) -> None:
    assert not compilers.compiler_runs()
    with compiling(compiler):
        assert compilers.compiler_runs()
    assert not compilers.compiler_runs()
    with compiling(compiler, session=True):
        assert not compilers.compiler_runs()


def ended(folder: Path, seconds: float) -> protocol.Ran | protocol.Failed:
    """What is said of a worker that takes so many seconds for a step, of which it may take one."""
    ours, theirs = socket.socketpair()
    caller, other = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        protocol.receive(theirs)
        time.sleep(seconds)
        protocol.send(theirs, protocol.Ran(Ending(kind="finished")))
        os._exit(0)
    theirs.close()
    folder.mkdir()
    standing = Runner([pid], [ours])
    with caller, other:
        answer = supervise(standing, caller, protocol.Run(CASE, str(folder), 1.0, 2.0))
    standing.kill()
    return answer


@pytest.mark.long
@pytest.mark.slow
def test_a_worker_is_not_ended_while_a_compiler_runs_for_it(compiler: Path, tmp_path: Path) -> None:
    with compiling(compiler):
        answer = ended(tmp_path / "compiling", 3.5)  # over the limits of the step and of the case
    assert isinstance(answer, protocol.Ran)
    assert answer.ending.kind == "finished"
    answer = ended(tmp_path / "stuck", 60)
    assert isinstance(answer, protocol.Ran)
    assert (answer.ending.kind, answer.ending.detail) == ("hung", "no end of the step within 1 s")


@pytest.mark.slow
def test_a_compiler_that_never_ends_keeps_no_worker_for_ever(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "MOST_SECONDS", 0.5)
    with compiling(compiler):
        answer = ended(tmp_path / "stuck", 60)
    assert isinstance(answer, protocol.Ran)
    assert answer.ending.kind == "hung"


def test_an_engine_that_is_built_may_compile(compiler: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not compilers.answers_within(ours, 0.3)
        with compiling(compiler):
            later = threading.Timer(1.0, theirs.send, (b"x",))
            later.start()
            assert compilers.answers_within(ours, 0.3)
            later.join()


def test_a_refused_engine_shows_the_releases_own_traceback() -> None:
    error = WouldNotStart(
        "SGLang does not run this", consequence="c", remedy="r", trace="Traceback:\n  File x\nKeyError: 'a'\n"
    )
    assert str(error).endswith("  try: r\n    Traceback:\n      File x\n    KeyError: 'a'")
    assert str(WouldNotStart("a", consequence="c", remedy="r")) == "a\n  so:  c\n  try: r"
