"""A campaign on Ray, on clusters whose nodes are processes of this machine. CI has no Ray: docs/records/detection.md says how
these were run, and what was measured."""

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

pytest.importorskip("ray", reason="Ray is not installed")

ROOT = Path(__file__).parents[2]
SLEEP = 0.2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without workers, and four nodes of one core each."""
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(4):
        started.add_node(num_cpus=1)
    yield started
    started.shutdown()


def driver(cluster: Any, folder: Path, workers: int, cases: int) -> "subprocess.Popen[bytes]":
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.harness.campaign_driver", cluster.address, str(folder)]
    with (folder / "said").open("ab") as said:
        return subprocess.Popen([*command, str(workers), str(cases), str(SLEEP)], cwd=ROOT, stdout=said, stderr=said)


def journal(folder: Path) -> list[dict[str, Any]]:
    file = folder / "journal.jsonl"
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def until(folder: Path, cases: int) -> None:
    """Wait until the driver has seen so many."""
    end = time.monotonic() + 120
    while sum(one["type"] == "Saw" for one in journal(folder)) < cases:
        assert time.monotonic() < end, (folder / "said").read_text()
        time.sleep(0.1)


def rate(folder: Path) -> float:
    """Cases a second, from the first to the last."""
    at = [one["at"] for one in journal(folder) if one["type"] == "Saw"]
    return (len(at) - 1) / (at[-1] - at[0])


def ran(folder: Path) -> Counter[str]:
    lines = (folder / "ran").read_text().splitlines()
    return Counter(line for line in lines if line[0].isdigit())


def told(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n{text}")


def test_four_workers_are_three_and_a_half_times_as_fast_as_one(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case is a sleep, so that the number of cores does not matter: what is left are the gaps between cases."""
    rates = {}
    for workers, cases in ((1, 60), (4, 240)):
        folder = tmp_path / str(workers)
        assert driver(cluster, folder, workers, cases).wait(200) == 1
        rates[workers] = rate(folder)
    told(capsys, f"cases/s: {rates}, {rates[4] / rates[1]:.2f} times; of {1 / SLEEP:.0f} a worker that is never idle")
    assert rates[4] >= 3.4 * rates[1]


def test_a_killed_worker_a_killed_node_and_a_killed_driver_lose_nothing(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cases = tmp_path / "killed", 1200
    first = driver(cluster, folder, 4, cases)
    until(folder, 200)
    worker = next(one["process"] for one in journal(folder) if one["type"] == "Joined")
    os.kill(worker, signal.SIGKILL)
    until(folder, 400)
    first.kill()
    first.wait()
    second = driver(cluster, folder, 0, cases)
    until(folder, 700)
    cluster.remove_node(sorted(cluster.worker_nodes, key=lambda node: node.unique_id)[0], allow_graceful=False)
    assert second.wait(300) == 1, (folder / "said").read_text()
    counted = ran(folder)
    twice = sum(number - 1 for number in counted.values())
    summary = json.loads((folder / "summary.json").read_text())
    done = summary["campaign"]
    told(capsys, f"{len(counted)} cases, {twice} ran twice ({twice / len(counted):.2%}); {done}")
    assert {one["told"]["case"]["name"] for one in journal(folder) if one["type"] == "Saw"} <= set(counted)
    assert summary["tally"]["cases"] == cases
    assert sorted(one["signature"]["rule"] or one["signature"]["cause"] for one in summary["findings"]) == [
        "IndexError",
        "draft.kv",
    ]
    assert sum(one["type"] == "InquiryOver" and one["told"]["type"] == "Packed" for one in journal(folder)) == 2
    assert twice <= done["again"]
    assert done["deaths"] >= 2
    assert done["drivers"] == 2
    assert twice <= 0.01 * cases


def test_a_planted_fault_is_found_once_and_made_small_once(cluster: Any, tmp_path: Path) -> None:
    """With SGLang's own worker."""
    command = [sys.executable, "-P", "-m", "eagletwin", "campaign", "--address", cluster.address, "--workers", "2"]
    command += ["--revert", "25015", "--model", "llama-tiny", "--cases", "48", "--minutes", "8"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=550)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("DIVERGED") == 1
    folder = tmp_path / "eagletwin-runs" / "campaign-0"
    concluded = [one["told"] for one in journal(folder) if one["type"] == "InquiryOver"]
    assert [one["signature"]["rule"] for one in concluded] == ["draft.positions"]
    [finding] = json.loads((folder / "summary.json").read_text())["findings"]
    case = finding["case"]
    assert (case["model"], len(case["requests"]), case["requests"][0]["max_new_tokens"]) == ("llama-tiny", 1, 2)
    script = tmp_path / finding["folder"] / "repro.py"
    again = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, timeout=200)
    assert again.returncode == 1, again.stderr
