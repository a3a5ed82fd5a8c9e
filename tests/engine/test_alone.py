"""An engine of one rank costs nearly nothing while it waits."""

from pathlib import Path

import psutil

from eagletwin.harness.core.case import Case
from eagletwin.harness.engines.host import Host

# torch's name of the thread that each of its gloo devices has, which wakes up a hundred times a second.
LISTENS = "gloo_tcp_loop"


def listening(process: psutil.Process) -> int:
    names = [Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text() for thread in process.threads()]
    return names.count(f"{LISTENS}\n")


def test_the_groups_of_one_rank_share_the_thread_that_listens(host: Host, busy_case: Case) -> None:
    host.engine(busy_case)
    assert host._zygote is not None
    assert host._zygote._process is not None
    engines = psutil.Process(host._zygote._process.pid).children()
    assert {listening(engine) for engine in engines} - {0} == {1}  # 0: of one that has ended
