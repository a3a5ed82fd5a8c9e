"""A limit tells a hang from a death, also where the death took longer than the limit or the watcher was held up."""

import faulthandler
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Ending
from eagletwin.harness.engines import wire
from eagletwin.harness.engines.sglang.processes.supervise import Runner, supervise

CASE = Case(name="a", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))


@pytest.mark.parametrize(
    ("death", "ending"),
    [
        (signal.SIGSEGV, Ending(kind="crashed", detail="killed by SIGSEGV", where="start")),
        # another rank's end may abort a process: of itself it says nothing of what went wrong
        (signal.SIGABRT, Ending(kind="hung", detail="no end of the step within 0.2 s", where="start")),
    ],
)
def test_a_death_that_is_seen_only_after_the_limit_is_a_death(tmp_path: Path, death: signal.Signals, ending: Ending) -> None:
    """As of a process that writes its core for longer than a step may take: its connection stays open meanwhile."""
    ours, theirs = socket.socketpair()
    caller, other = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # pytest's, whose stack would be in the way of the test's own output
        os.kill(os.getpid(), death)
    with caller, other, theirs:  # open here, too, so that the end of the process does not close it
        answer = supervise(Runner([pid], [ours]), caller, wire.Run(CASE, str(tmp_path), 0.2, 60.0))
    assert answer == wire.Ran(ending, (0,))


def test_an_answer_that_came_while_the_watcher_was_held_up_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    caller, other = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        wire.receive(theirs)
        wire.send(theirs, wire.Ran(Ending(kind="finished")))
        os._exit(0)
    theirs.close()
    send = wire.send

    def send_and_stop(connection: socket.socket, message: wire.Run) -> None:
        send(connection, message)
        time.sleep(0.4)  # twice as long as a step may take

    monkeypatch.setattr(wire, "send", send_and_stop)
    standing = Runner([pid], [ours])
    with caller, other:
        answer = supervise(standing, caller, wire.Run(CASE, str(tmp_path), 0.2, 60.0))
    standing.kill()
    assert answer == wire.Ran(Ending(kind="finished"))
