"""Real servers under `eagletwin record`, each with a fault planted in it: what `eagletwin judge` says of their recordings.

`python -m tests.gpu.recorded_faults OUT` starts `python -m sglang.launch_server` on the GPU (graphs, overlap), so many at a
time; with --cpu `python -m tests.lab serve`. Recordings have private token ids, and the judge no model; where integers do not
show a fault, recordings have rows, and the judge has the checkpoints, too. Writes OUT/results.jsonl and OUT/table.md; exit code
0 if each fault showed by the rule that server_faults.py says, and the healthy servers are equal.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagletwin.harness.core.trace import HEADER
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.store import checkpoints

from ..engine.server_faults import FAULTS, MODEL, Fault
from ..lab.common import module
from .launched import END_SECONDS, end, environment, until_ready, write_plugin

HEALTHY = ("healthy, chains", "healthy, trees", "healthy, chains, with rows", "healthy, trees, with rows")
LOAD_SECONDS = 3.0
LEAST_PLACES = 6


@dataclass(frozen=True)
class Asked:
    """What is run, and where."""

    out: Path
    cpu: bool
    more: tuple[str, ...]  # further arguments of SGLang


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu", action="store_true", help="`python -m tests.lab serve` in place of launch_server")
    parser.add_argument("--at-once", type=int, default=4, help="servers at one time")
    parser.add_argument("--only", action="append", help="faults whose names hold these words; repeatable")
    parser.add_argument("more", nargs="*", help="behind --: further arguments of SGLang")
    given = parser.parse_args()
    asked = Asked(given.out.absolute(), given.cpu, tuple(given.more))
    asked.out.mkdir(parents=True, exist_ok=True)
    for model in {MODEL, *(fault.model for fault in FAULTS.values())}:
        checkpoints(model)  # written once, before servers ask for it side by side
    write_plugin(asked.out / "plugin")
    names = [name for name in [*HEALTHY, *FAULTS] if any(words in name for words in given.only or [""])]
    begin = time.monotonic()
    with ThreadPoolExecutor(given.at_once) as pool, (asked.out / "results.jsonl").open("a") as file:
        results = []
        for result in pool.map(lambda name: _one(asked, name, names.index(name)), names):
            results.append(result)
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(json.dumps(result), flush=True)
    (asked.out / "table.md").write_text(_table(results))
    print(f"{len(results)} servers in {time.monotonic() - begin:.0f} s")
    return 0 if all(result["as_said"] for result in results) else 1


def _one(asked: Asked, name: str, number: int) -> dict[str, Any]:
    """Serve with one fault, and judge what was recorded."""
    fault = FAULTS.get(name)
    folder = asked.out / f"{number:02}"
    folder.mkdir(exist_ok=True)
    port, begin = 24000 + 40 * number, time.monotonic()
    log = folder / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            _command(asked, name, "trees" in name if fault is None else fault.tree, folder, port),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(asked, name, folder),
            start_new_session=True,
        )
    try:
        why = until_ready(process, port)
        stood = time.monotonic() - begin
        answers = 0 if why else _load(port, folder / "recordings")
    finally:
        ended = process.poll()
        end(process)
    judged = _judged(folder)
    weighed = _judged(folder, _model(name)) if _has_rows(name) else {"rule": "", "status": "equal"}
    expected = "" if fault is None else fault.rule if asked.cpu else fault.graphs
    ran = fault is None or "ran, as patched" in log.read_text(errors="replace")
    shown = judged["rule"]
    return {
        "fault": name,
        "answers": answers,
        "started_in_s": round(stood, 1),
        "seconds": round(time.monotonic() - begin, 1),
        "server": why or ("served to the end" if ended is None else f"ended by itself: {ended}"),
        "ran": ran,
        **judged,
        "expected": expected,
        "with_checkpoints": weighed["rule"] or weighed["status"],
        "as_said": ran and not why and shown == expected and _fits(fault, judged, weighed),
        "log": "" if not why else log.read_text(errors="replace")[-1500:],
    }


def _fits(fault: Fault | None, judged: dict[str, Any], weighed: dict[str, Any]) -> bool:
    """Whether the two statuses are right, whatever the rules."""
    found = judged["status"] if fault is None or not fault.weights else weighed["status"]
    return bool(found == ("equal" if fault is None else "diverged") and (fault is not None or weighed["status"] == "equal"))


def _has_rows(name: str) -> bool:
    """Whether rows are recorded, since integers alone do not show the fault everywhere. All others have private ids."""
    return name.endswith("rows") or (name in FAULTS and bool(FAULTS[name].weights))


def _model(name: str) -> str:
    return FAULTS[name].model if name in FAULTS else MODEL


def _command(asked: Asked, name: str, tree: bool, folder: Path, port: int) -> list[str]:
    """`eagletwin record` of a server."""
    record = [sys.executable, "-m", "eagletwin", "record", str(folder / "recordings"), "--every", "1", "--share", "1"]
    record += ["--at-once", "16", *(["--rows", "512"] if _has_rows(name) else ["--private"]), "--"]
    target, draft = map(str, checkpoints(_model(name)))
    if asked.cpu:
        named = ["--target", target, "--draft", draft, "--port", str(port), "--chunked-prefill-size", "16", "--overlap"]
        named += ["--topk", "3", "--num-draft-tokens", "8"] if tree else []
        return [*record, *module("tests.lab", "serve"), *named, *(["--", *asked.more] if asked.more else [])]
    words = {
        "model-path": target,
        "speculative-draft-model-path": draft,
        "speculative-algorithm": RECIPES[_model(name)].algorithm,
        "speculative-num-steps": 3,
        "speculative-eagle-topk": 3 if tree else 1,
        "speculative-num-draft-tokens": 8 if tree else 4,
        "chunked-prefill-size": 16,
        "attention-backend": "triton",
        "dtype": "float32" if _has_rows(name) else "bfloat16",
        "mem-fraction-static": 0.3,
        "max-total-tokens": 32768,
        "max-running-requests": 16,
        "cuda-graph-max-bs-decode": 16,
        "random-seed": 0,
        "host": "127.0.0.1",
        "port": port,
        "log-level": "error",
    }
    named = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    named += ["--skip-tokenizer-init", "--skip-server-warmup"]
    return [*record, sys.executable, "-m", "sglang.launch_server", *named, *asked.more]


def _environment(asked: Asked, name: str, folder: Path) -> dict[str, str]:
    fault = FAULTS.get(name)
    return environment(
        asked.out / "plugin", float32=not asked.cpu and _has_rows(name), patch=fault.patch if fault else None, folder=folder
    )


def _load(port: int, recordings: Path) -> int:
    """Requests at once, for some seconds: chunks, prefixes in the cache, stop tokens that lie next to the limit. How many
    were answered."""
    import random

    draw = random.Random(3)
    prompts = [[draw.randrange(3, 90) for _ in range(length)] for length in (5, 20, 40, 65, 9, 33, 63, 100, 64, 12, 50, 31)]
    begin, answers = time.monotonic(), 0
    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(lambda prompt: _answer(port, prompt, {"max_new_tokens": 24, "ignore_eos": True}), prompts))
        answers += sum(text is not None for text in texts)
        place = 2
        while any(texts) and (place < LEAST_PLACES or time.monotonic() < begin + LOAD_SECONDS):
            asked = [
                (prompt, {"max_new_tokens": place % 20 + 2, "stop_token_ids": [text[place % len(text)]], "ignore_eos": False})
                for prompt, text in zip(prompts, texts, strict=True)
                if text is not None
            ]
            answers += sum(one is not None for one in pool.map(lambda both: _answer(port, *both), asked))
            place += 1
    until = time.monotonic() + END_SECONDS
    while len(list(recordings.glob(f"*/*/{HEADER}"))) < answers and time.monotonic() < until:
        time.sleep(0.2)
    return answers


def _answer(port: int, prompt: list[int], sampling: dict[str, object]) -> list[int] | None:
    """The tokens; None where the server fails."""
    body = json.dumps({"input_ids": prompt, "sampling_params": {"temperature": 0, **sampling}}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            tokens: list[int] = json.load(reply)["output_ids"]
            return tokens
    except (OSError, ValueError, KeyError):
        return None


def _judged(folder: Path, model: str = "") -> dict[str, Any]:
    """What `eagletwin judge` says; with the checkpoints of a model, where one is named."""
    words = [sys.executable, "-m", "eagletwin", "judge", str(folder / "recordings"), "--json"]
    if model:
        target, draft = map(str, checkpoints(model))
        words += ["--target", target, "--draft", draft]
    done = subprocess.run(words, capture_output=True, text=True)
    try:
        said = json.loads(done.stdout)
        requests = said["requests"]
        first = next((one["headline"] for one in requests if one["status"] == "diverged"), "")
        doubt = next((one["headline"] for one in requests if one["status"] == "unknown"), "")
        counts = {status: sum(one["status"] == status for one in requests) for status in ("equal", "diverged", "unknown")}
        return {
            "status": said["status"],
            "rule": first.split(",")[0],
            "first": first,
            "doubt": doubt,
            "recorded": counts,
            "rounds": sum(one["rounds"] for one in requests),
        }
    except (ValueError, KeyError, TypeError):
        return {"status": f"exit code {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}", "rule": "", "recorded": {}}


def _table(results: list[dict[str, Any]]) -> str:
    lines = ["| fault | recorded | diverged | integers | with the checkpoints | as said |", "|---|---|---|---|---|---|"]
    for one in results:
        counts = one["recorded"]
        rule = f"`{one['rule']}`" if one["rule"] else "none"
        lines.append(
            f"| {one['fault']} | {sum(counts.values())} | {counts.get('diverged', 0)} | {rule} | {one['with_checkpoints']} | "
            f"{'yes' if one['as_said'] else 'no: ' + str(one['server'])} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
