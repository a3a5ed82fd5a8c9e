"""An engine of one rank costs nearly nothing while it waits."""

import contextlib
from pathlib import Path

import psutil
from msgspec.structs import replace

from eagletwin.harness.core.case import Case
from eagletwin.harness.engines.host import Host

# torch's name of the thread that each of its gloo devices has, which wakes up a hundred times a second.
LISTENS = "gloo_tcp_loop"


def listening(process: psutil.Process) -> int:
    """0 of one that has ended."""
    names = []
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        names = [Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text() for thread in process.threads()]
    return names.count(f"{LISTENS}\n")


def test_the_groups_of_one_rank_share_the_thread_that_listens(host: Host, busy_case: Case) -> None:
    before = psutil.Process().children(recursive=True)
    host.engine(replace(busy_case, num_steps=2, page_size=2))
    engines = [process for process in psutil.Process().children(recursive=True) if process not in before]
    assert {listening(engine) for engine in engines} - {0} == {1}  # 0: of what imports SGLang, if it just has
