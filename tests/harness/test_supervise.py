"""A limit tells a hang from a death, also where the death took longer than the limit or the watcher was held up."""

import faulthandler
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Ending
from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.sglang.processes import supervise as supervising
from eagletwin.harness.engines.sglang.processes.supervise import Runner, supervise

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
