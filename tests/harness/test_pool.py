"""A search with workers: blocks in their order, limits that tell a hang from a death, and compilers that no limit counts."""

import faulthandler
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.cli.main import run_command
from eagletwin.harness.commands.fuzz.looking import CaseSeen
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.pool import Actors, BlockPool, Process, Workers
from eagletwin.harness.commands.fuzz.tally import Tally
from eagletwin.harness.commands.fuzz.worker import BlockFailed, BlockJob, BlockOver, Seen, encode_line
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.errors import EXIT_HARNESS, HarnessError, run_guarded
from eagletwin.harness.core.records import Ending
from eagletwin.harness.core.run_spec import DEFAULT_RUN
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines import machine, protocol
from eagletwin.harness.engines.host import WouldNotStart
from eagletwin.harness.engines.inside import supervise as supervising
from eagletwin.harness.engines.inside.supervise import Runner, supervise

# A search with workers: blocks come in their order, nobody waits for another one's block while there are more, and a worker
# that ends is replaced, and said.


BLOCKS = 40

UNCHANGED = SimpleNamespace(host=SimpleNamespace(source=SimpleNamespace(difference=None)), run=DEFAULT_RUN)


def cases_of(block: int) -> list[CaseSeen]:
    cases = [replace(LEDGER["25015"].case, name=f"{block}.{place}") for place in range(3)]
    return [CaseSeen(block=block, case=case, verdict=Verdict(status="equal")) for case in cases]


class Here:
    """What this process runs. at: what happens when a case is run."""

    def __init__(self, at: dict[str, Callable[[], None]] | None = None) -> None:
        self.ran: list[str] = []
        self._at = at or {}

    def first(self, earlier: Sequence[CaseSeen] = ()) -> Iterator[CaseSeen]:
        return iter(earlier[:0])

    def block(self, number: int, earlier: Sequence[CaseSeen] = ()) -> Iterator[CaseSeen]:
        for seen in cases_of(number)[len(earlier) :]:
            self.ran.append(seen.case.name)
            self._at.get(seen.case.name, lambda: None)()
            yield seen


def pool_of(workers: Workers, here: Here, tally: Tally | None = None) -> BlockPool:
    pool = BlockPool(UNCHANGED, SearchOptions().plan, workers, tally=tally)  # type: ignore[arg-type]
    pool._looking = here  # type: ignore[assignment]
    return pool


def names(block: Iterator[Seen]) -> list[str]:
    return [one.case.name for one in block if isinstance(one, CaseSeen)]


ALL = [[f"{block}.{place}" for place in range(3)] for block in range(BLOCKS)]


class Slow:
    """One worker, which takes a block and answers it when it may."""

    ahead = 8

    def __init__(self, answers: list[bytes]) -> None:
        self.has_one, self.may = Event(), Event()
        self._answers = answers

    def number(self) -> int:
        return 1

    def start(self) -> Any:
        return self

    def wait(self) -> None:
        pass

    def run(self, _job: bytes) -> Iterator[bytes]:
        self.has_one.set()
        self.may.wait()
        yield from self._answers

    def kill(self) -> None:
        self.may.set()

    close = kill

    def describe_exit(self, error: Exception) -> str:
        return str(error)


def test_while_one_block_takes_long_elsewhere_many_are_run_here() -> None:
    slow = Slow([encode_line(one) for one in (*cases_of(1), BlockOver())])
    here = Here({"4.1": slow.may.set})
    with pool_of(slow, here) as pool:
        slow.has_one.wait()  # the second block: the first one is run here
        assert [names(block) for block in islice(pool.blocks(), 2)] == ALL[:2]
    assert here.ran[:11] == ["0.0", "0.1", "0.2", "2.0", "2.1", "2.2", "3.0", "3.1", "3.2", "4.0", "4.1"]


def test_no_block_is_run_too_long_before_its_turn() -> None:
    slow = Slow([encode_line(BlockOver())])
    here = Here({"9.2": slow.may.set})
    with pool_of(slow, here) as pool:
        slow.has_one.wait()
        assert [names(block) for block in islice(pool.blocks(), 2)] == [ALL[0], []]
        assert here.ran[-1] == "9.2"


def test_a_block_in_which_eagletwin_itself_fails_ends_the_search() -> None:
    slow = Slow([encode_line(BlockFailed("a bug", "nothing is known of the block", "report it"))])
    slow.may.set()
    with pool_of(slow, Here()) as pool:
        slow.has_one.wait()
        blocks = pool.blocks()
        assert names(next(blocks)) == ALL[0]
        with pytest.raises(HarnessError, match="a bug"):
            names(next(blocks))


# A worker that answers each block from a file, and dies: `unread` before it reads what is searched, `before` it answers
# anything, or `after` the first answer of a block. It dies as long as there are `deaths` left in the file.
SCRIPT = """
import json, os, pathlib, sys
folder, when = pathlib.Path(sys.argv[1]), sys.argv[2]

def die(now):
    left = int((folder / "deaths").read_text())
    if left and when == now:
        (folder / "deaths").write_text(str(left - 1))
        os._exit(7)

die("unread")
sys.stdin.readline()
for line in sys.stdin:
    wanted = json.loads(line)
    die("before")
    lines = (folder / f"{wanted['block']}").read_text().splitlines(keepends=True)
    for line in lines[len(wanted["earlier"]):]:
        sys.stdout.write(line)
        sys.stdout.flush()
        if "BlockOver" not in line:
            die("after")
"""


class Scripted:
    """One worker at a time that is the script. started: how many of them there were."""

    ahead = 8

    def __init__(self, folder: Path, when: str, deaths: int) -> None:
        self._command = [sys.executable, "-c", SCRIPT, str(folder), when]
        self.started = 0
        (folder / "deaths").write_text(str(deaths))
        for number in range(BLOCKS):
            (folder / f"{number}").write_bytes(b"".join(encode_line(one) for one in (*cases_of(number), BlockOver())))

    def number(self) -> int:
        return 1

    def start(self) -> Process:
        self.started += 1
        return Process(self._command, b"what is searched\n")


def search(workers: Workers, blocks: int, tally: Tally | None = None, here: Here | None = None) -> list[list[str]]:
    """The cases of so many blocks, the second of which a worker has begun."""
    with pool_of(workers, here or Here(), tally) as pool:
        while pool._running <= {0} and not pool._failed:
            pool._threads[0].join(0.01)
        return [names(block) for block in islice(pool.blocks(), blocks)]


@pytest.mark.parametrize("when", ["unread", "before", "after"])
def test_a_worker_that_dies_is_named_and_replaced_and_no_case_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], when: str
) -> None:
    workers, tally = Scripted(tmp_path, when, 2), Tally()
    assert search(workers, 3, tally) == ALL[:3]
    assert workers.started == 3
    said = capfd.readouterr().err
    assert said.count("note: a worker ended with exit status 7 ") == 2
    assert said.count("another one takes its place") == 2
    assert not tally.lost


def test_a_block_over_which_worker_after_worker_ends_is_given_up_and_the_rest_is_searched(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    workers, tally = Scripted(tmp_path, "before", 3), Tally()
    assert search(workers, 3, tally) == [ALL[0], [], ALL[2]]
    [lost] = tally.lost
    assert lost == "block 1, over which 3 workers ended: the last one ended with exit status 7"
    assert tally.deaths == 3
    assert f"note: not searched: {lost}" in capfd.readouterr().err


def test_where_no_worker_runs_a_block_the_search_ends(tmp_path: Path) -> None:
    tally = Tally()

    def wait() -> None:  # this process would run the blocks that slow workers leave
        while len(tally.lost) < 3:
            time.sleep(0.01)

    with pytest.raises(HarnessError, match="workers end in each block: the last one ended with exit status 7"):
        search(Scripted(tmp_path, "before", 100), BLOCKS, tally, Here({"2.0": wait}))


def test_where_no_worker_gets_up_the_search_ends(capfd: pytest.CaptureFixture[str]) -> None:
    class Unborn(Slow):
        def wait(self) -> None:
            raise EOFError("fell over")

    with pytest.raises(HarnessError, match="3 workers, one after the other, ended before they were up: the last one fell over"):
        search(Unborn([]), BLOCKS)
    assert "note: a worker fell over before it was up; another one takes its place" in capfd.readouterr().err


class Ray:
    """As much of Ray as a search uses. gone: actors that end over their first job, with what Ray would say."""

    def __init__(self, gone: int) -> None:
        self.gone, self.killed, self.log = gone, 0, Counter[str]()

    def init(self, **how: Any) -> None:
        assert how["address"] == "here:1"

    def shutdown(self) -> None:
        pass

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0, "memory": 1e12}

    def remote(self, kind: type) -> Any:
        def actor(terms: bytes) -> Any:
            worker = kind(terms)
            run = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda job: self._run(worker, job)))
            return SimpleNamespace(up=SimpleNamespace(remote=lambda: 1), run=run)

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=actor))

    def _run(self, worker: Any, job: bytes) -> Iterator[bytes]:
        answers = worker.run(job)
        if self.gone:
            self.gone -= 1
            yield next(answers)
            raise RuntimeError("\x1b[31mThe node\n of the actor is gone")
        yield from answers

    def get(self, value: Any) -> Any:
        return value

    def kill(self, _actor: Any) -> None:
        self.killed += 1


class Answering:
    """What an actor is."""

    def __init__(self, terms: bytes) -> None:
        assert b"here:1" in terms

    def run(self, job: bytes) -> Iterator[bytes]:
        wanted = msgspec.json.decode(job, type=BlockJob)
        for seen in (*cases_of(wanted.block)[len(wanted.earlier) :], BlockOver()):
            yield encode_line(seen)


def test_actors_of_a_cluster_run_blocks_and_those_that_end_are_replaced(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ray, tally = Ray(gone=2), Tally()
    monkeypatch.setitem(sys.modules, "ray", ray)
    with Actors(SearchOptions(address="here:1"), Answering) as actors:
        assert actors.number() == 2
        assert search(actors, 12, tally) == ALL[:12]
    assert tally.deaths == 2
    assert ray.killed >= 4  # two that ended, and two as the search was over
    assert "a worker ended (The node of the actor is gone) in block" in capfd.readouterr().err


def test_without_ray_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run_guarded(lambda: run_command(["fuzz", "--address", "auto", "--out", str(tmp_path / "runs")])) == EXIT_HARNESS
    assert "Ray is not installed\n  so:  nothing was run" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# A limit tells a hang from a death, also where the death took longer than the limit or the watcher was held up.


CASE = Case(name="a", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
LIMIT = 0.2


def forked(does: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # pytest's, whose stack would be in the way of the test's own output
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        does()
        os._exit(0)
    return pid


def said_of(pid: int, folder: Path) -> protocol.Ran | protocol.Failed:
    """What is said of a process whose end closes no connection, since it is open here as well."""
    ours, theirs = socket.socketpair()
    caller, other = socket.socketpair()
    with caller, other, theirs:
        return supervise(Runner([pid], [ours]), caller, protocol.Run(CASE, str(folder), LIMIT, 60.0))


@pytest.mark.parametrize("death", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_death_that_was_not_heard_of_is_no_hang(tmp_path: Path, death: signal.Signals) -> None:
    pid = forked(lambda: os.kill(os.getpid(), death))
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert said_of(pid, tmp_path) == protocol.Ran(Ending(kind="crashed", detail=f"killed by {death.name}", where="start"), (0,))


def test_a_process_that_writes_its_core_for_longer_than_the_limit_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies_slowly() -> None:
        time.sleep(5 * LIMIT)
        os.kill(os.getpid(), signal.SIGSEGV)

    monkeypatch.setattr(supervising, "is_dying", lambda _: True)
    answer = said_of(forked(dies_slowly), tmp_path)
    assert answer == protocol.Ran(Ending(kind="crashed", detail="killed by SIGSEGV", where="start"), (0,))


def test_a_process_that_lives_hangs(tmp_path: Path) -> None:
    pid = forked(lambda: time.sleep(60))
    assert not supervising.is_dying(pid)
    answer = said_of(pid, tmp_path)
    assert answer == protocol.Ran(Ending(kind="hung", detail=f"no end of the step within {LIMIT:g} s", where="start"), (0,))


def test_an_answer_that_came_while_the_watcher_was_held_up_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    caller, other = socket.socketpair()

    def answers() -> None:
        protocol.receive(theirs)
        send(theirs, protocol.Ran(Ending(kind="finished")))

    send = protocol.send
    pid = forked(answers)
    theirs.close()

    def send_and_stop(connection: socket.socket, message: protocol.Run) -> None:
        send(connection, message)
        assert select.select([connection], [], [], 60)[0]
        time.sleep(2 * LIMIT)

    monkeypatch.setattr(protocol, "send", send_and_stop)
    standing = Runner([pid], [ours])
    with caller, other:
        answer = supervise(standing, caller, protocol.Run(CASE, str(tmp_path), LIMIT, 60.0))
    standing.kill()
    assert answer == protocol.Ran(Ending(kind="finished"))


# A limit does not count the time in which a compiler runs: a worker that compiles a kernel is not ended for it.


COMPILERS_CASE = Case(name="a", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that does not end, by a name that no compiler of a test has that runs beside this one."""
    program = tmp_path / f"slow-{os.getpid()}"
    program.write_text("#!/bin/sh\nread never\n")  # in the shell itself: a child would have its name for a moment
    program.chmod(0o755)
    monkeypatch.setattr(machine, "_COMPILERS", frozenset({program.name}))
    for module in (machine, supervise.__globals__):
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
    assert not machine.compiler_runs()
    with compiling(compiler):
        assert machine.compiler_runs()
    assert not machine.compiler_runs()
    with compiling(compiler, session=True):
        assert not machine.compiler_runs()


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
        answer = supervise(standing, caller, protocol.Run(COMPILERS_CASE, str(folder), 1.0, 2.0))
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
    monkeypatch.setattr(machine, "MOST_SECONDS", 0.5)
    with compiling(compiler):
        answer = ended(tmp_path / "stuck", 60)
    assert isinstance(answer, protocol.Ran)
    assert answer.ending.kind == "hung"


def test_an_engine_that_is_built_may_compile(compiler: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not machine.answers_within(ours, 0.3)
        with compiling(compiler):
            later = threading.Timer(1.0, theirs.send, (b"x",))
            later.start()
            assert machine.answers_within(ours, 0.3)
            later.join()


def test_a_refused_engine_shows_the_releases_own_traceback() -> None:
    error = WouldNotStart(
        "SGLang does not run this", consequence="c", remedy="r", trace="Traceback:\n  File x\nKeyError: 'a'\n"
    )
    assert str(error).endswith("  try: r\n    Traceback:\n      File x\n    KeyError: 'a'")
    assert str(WouldNotStart("a", consequence="c", remedy="r")) == "a\n  so:  c\n  try: r"
