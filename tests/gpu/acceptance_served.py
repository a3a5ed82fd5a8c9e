"""Rounds deserved and rounds used on SGLang's own `launch_server`, healthy and with a bug of the ledger.

`python -m tests.gpu.acceptance_served OUT --pair FOLDER` starts each server of SERVERS with the trained pair (CUDA graphs,
overlap, float32, in which near ties are rare), sends it prompts out of Python's library by `eagletwin acceptance --server`,
and writes OUT/results.jsonl. Exit code 0 if each verdict is the one that is said here.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL
from tests.lab.train.text import standard_library

from .launched import end, environment, until_ready, write_plugin

BEGIN_OF_TEXT, NEW_TOKENS = 256, 48
MTP = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "eagletwin.harness.engines.sglang.boot.served"}  # SGLang has no class of such a Llama
SHORT, LONG = (4, 7), (120, 400)  # bytes behind the first token, of a prompt that fills at most a chunk of 8, or many


@dataclass(frozen=True)
class Served:
    """A server, and what is asked of it.

    draft    eagle, eagle3 or mtp, of the pair
    prompts  their number; each is sent three times
    apart    prompts tell apart what a chunk does to an answer: short ones and long ones, in chunks of 8
    undone   the entry of the ledger whose fix is undone
    more     further arguments of launch_server
    """

    draft: str
    prompts: int
    tree: bool = False
    apart: bool = False
    undone: str = ""
    temperature: float = 0.0
    dtype: str = "float32"
    more: tuple[str, ...] = ()
    expected: int = EXIT_EQUAL


SERVERS = {
    "EAGLE": Served("eagle", 170),
    "EAGLE, trees": Served("eagle", 60, tree=True),
    "EAGLE-3": Served("eagle3", 60),
    "EAGLE, rejection sampling": Served("eagle", 60, temperature=1.0, more=("--speculative-use-rejection-sampling",)),
    "EAGLE-3, 25015 undone": Served("eagle3", 33, undone="25015", expected=EXIT_DIVERGED),
    "EAGLE-3, 26329 undone": Served("eagle3", 33, apart=True, undone="26329", expected=EXIT_DIVERGED),
    "EAGLE, trees, 26997-hidden undone": Served("eagle", 33, tree=True, undone="26997-hidden", expected=EXIT_DIVERGED),
    "MTP of 3 layers, the chunk tail is live": Served("mtp", 33, apart=True, expected=EXIT_DIVERGED),
}


def main() -> int:
    """Run all, or those that --only names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--pair", type=Path, required=True, help="folder of `python -m tests.lab train`")
    parser.add_argument("--at-once", type=int, default=4, help="servers at one time")
    parser.add_argument("--only", action="append", help="servers whose names hold these words; repeatable")
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    write_plugin(out / "plugin")
    names = [name for name in SERVERS if any(words in name for words in given.only or [""])]
    with ThreadPoolExecutor(given.at_once) as pool, (out / "results.jsonl").open("a") as file:
        results = []
        for result in pool.map(lambda name: _one(out, given.pair.absolute(), name), names):
            results.append(result)
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(json.dumps(result), flush=True)
    return 0 if all(result["as_said"] for result in results) else 1


def _one(out: Path, pair: Path, name: str) -> dict[str, Any]:
    """Serve, ask, and say what came of it."""
    served, number = SERVERS[name], list(SERVERS).index(name)
    folder = out / f"{number:02}"
    folder.mkdir(exist_ok=True)
    port, begin, log = 24000 + 40 * number, time.monotonic(), folder / "server.log"
    patch = LEDGER[served.undone].revert if served.undone else None
    with log.open("w") as file:
        process = subprocess.Popen(
            _command(served, pair, port),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(out / "plugin", float32=served.dtype == "float32", patch=patch, folder=folder) | MTP,
            start_new_session=True,
        )
    try:
        why = until_ready(process, port)
        stood = time.monotonic()
        said = {"code": None} if why else _asked(served, pair, folder, port)
    finally:
        end(process)
    ran = patch is None or "ran, as patched" in log.read_text(errors="replace")
    return {
        "server": name,
        "why": why,
        "started_in_s": round(stood - begin, 1),
        "seconds": round(time.monotonic() - stood, 1),
        "patch_ran": ran,
        **said,
        "as_said": ran and said["code"] == served.expected,
        "log": log.read_text(errors="replace")[-1500:] if why else "",
    }


def _command(served: Served, pair: Path, port: int) -> list[str]:
    words = {
        "model-path": pair / "target",
        "speculative-draft-model-path": pair / served.draft,
        "speculative-algorithm": "EAGLE3" if served.draft == "eagle3" else "EAGLE",
        "speculative-num-steps": 3,
        "speculative-eagle-topk": 3 if served.tree else 1,
        "speculative-num-draft-tokens": 8 if served.tree else 4,
        "chunked-prefill-size": 8 if served.apart else 64,
        "attention-backend": "triton",
        "dtype": served.dtype,
        "mem-fraction-static": 0.15,
        "max-total-tokens": 32768,
        "max-running-requests": 16,
        "cuda-graph-max-bs-decode": 16,
        "random-seed": 0,
        "host": "127.0.0.1",
        "port": port,
        "log-level": "error",
    }
    named = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    named += ["--skip-tokenizer-init", "--skip-server-warmup", *served.more]
    named += ["--enable-multi-layer-eagle"] if served.draft == "mtp" else []
    return [sys.executable, "-m", "sglang.launch_server", *named]


def _asked(served: Served, pair: Path, folder: Path, port: int) -> dict[str, Any]:
    """What `eagletwin acceptance` says of the server."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in _prompts(served)))
    words = [sys.executable, "-m", "eagletwin", "acceptance", "--target", str(pair / "target")]
    words += ["--draft", str(pair / served.draft), "--prompts", str(prompts), "--new-tokens", str(NEW_TOKENS)]
    words += ["--temperature", str(served.temperature)] if served.temperature else []
    words += ["--server", f"http://127.0.0.1:{port}", "--out", str(folder / "runs")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    (folder / "acceptance.txt").write_text(done.stdout + done.stderr)
    return {"code": done.returncode, "says": (done.stdout + done.stderr[-600:]).splitlines()[:40]}


def _prompts(served: Served) -> list[list[int]]:
    """Pieces of what no pair was trained on, behind the token that begins a text."""
    text, draw = standard_library().held_out, Random(19)
    found = []
    for number in range(served.prompts):
        length = draw.randint(*((SHORT, LONG)[number % 2] if served.apart else (5, 300)))
        begin = draw.randrange(len(text) - length)
        found.append([BEGIN_OF_TEXT, *text[begin : begin + length].tolist()])
    return found


if __name__ == "__main__":
    sys.exit(main())
