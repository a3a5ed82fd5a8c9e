"""A search on Ray, on a cluster whose nodes are processes of this machine. CI has no Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagletwin.harness.commands.fuzz.journal import JOURNAL, read_journal
from eagletwin.harness.commands.fuzz.looking import CaseSeen

pytest.importorskip("ray", reason="Ray is not installed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without workers, and two nodes of one core each."""
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        started.add_node(num_cpus=1)
    yield started
    started.shutdown()


def fuzz(*words: str, cwd: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", "eagletwin", "fuzz", *words]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_search_on_a_cluster_outlives_a_node_and_its_driver(cluster: Any, tmp_path: Path) -> None:
    """It finds a planted fault once, and runs next to nothing twice."""
    where = ("--address", cluster.address)
    first = fuzz("--revert", "25015", "--only", "llama-tiny", "--cases", "48", "--findings", "0", *where, cwd=tmp_path)
    folder = tmp_path / "eagletwin-runs" / "fuzz-0"
    end = time.monotonic() + 300
    while not (folder / JOURNAL).is_file() or sum(map(len, read_journal(folder).seen.values())) < 8:
        assert first.poll() is None
        assert time.monotonic() < end
        time.sleep(0.5)
    cluster.remove_node(sorted(cluster.worker_nodes, key=lambda node: node.unique_id)[0], allow_graceful=False)
    time.sleep(5.0)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = fuzz("--resume", str(folder), *where, cwd=tmp_path)
    text, _ = second.communicate(timeout=550)
    assert second.returncode == 1, text
    past = read_journal(folder)
    cases = Counter(one.case for of in past.seen.values() for one in of if isinstance(one, CaseSeen))
    assert set(cases.values()) == {1}
    assert past.drivers == 2
    [finding] = json.loads((folder / "summary.json").read_text())["findings"]
    assert finding["signature"]["rule"] == "draft.positions"
