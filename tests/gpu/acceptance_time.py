"""How long `eagletwin acceptance --device cuda` takes for a text of 2,000 tokens and a pair of 52 million parameters.

`python -m tests.gpu.acceptance_time OUT [--size large] [--device cuda] [--steps 150] [--train-only] [--profile]` trains the
pair briefly, so that some drafts are accepted. Then it times whole processes, each draft twice (the first compiles what
Python keeps), and within one process each text twice, since imports take most of the first. Prints a line for each.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.lab.train.pair import make_pair
from tests.lab.train.settings import SIZES
from tests.lab.train.text import standard_library

WITHIN = """
import json, sys, time
from eagletwin.harness.cli.main import run_command
for _ in range(2):
    begin = time.monotonic()
    try:
        run_command(sys.argv[1:])
    except SystemExit:
        pass
    print("seconds within", round(time.monotonic() - begin, 1), flush=True)
"""
PROFILED = """
import cProfile, pstats, sys
from eagletwin.harness.cli.main import run_command
profile = cProfile.Profile()
profile.enable()
try:
    run_command(sys.argv[2:])
finally:
    profile.disable()
    with open(sys.argv[1], "w") as file:
        pstats.Stats(profile, stream=file).sort_stats("cumtime").print_stats(60).sort_stats("tottime").print_stats(30)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="large")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=150, help="of training, of target and drafts each")
    parser.add_argument("--train-only", action="store_true", help="make the pair, which a later run takes as it is")
    parser.add_argument("--profile", action="store_true", help="also profile a process of each draft, into OUT")
    asked = parser.parse_args()
    pair = asked.out / "pair"
    pair.mkdir(parents=True, exist_ok=True)
    corpus, settings = standard_library(), SIZES[asked.size]
    courses = {
        "target_course": replace(settings.target_course, steps=asked.steps),
        "draft_course": replace(settings.draft_course, steps=asked.steps),
    }
    if not (pair / "pair.json").exists():
        make_pair(replace(settings, **courses, prompts=2, new_tokens=8), corpus, asked.device, pair, print)
    if asked.train_only:
        return
    prompts = asked.out / "text.jsonl"
    text = corpus.held_out[:2000].tolist()
    prompts.write_text(json.dumps({"input_ids": text[:16], "completion_ids": text[16:]}) + "\n")
    for draft in ("eagle", "eagle3", "mtp"):
        words = ["acceptance", "--target", str(pair / "target"), "--draft", str(pair / draft), "--prompts", str(prompts)]
        words += ["--device", asked.device, "--out", str(asked.out / "runs")]
        for turn in (1, 2):
            print(json.dumps({"draft": draft, "turn": turn, **_timed([sys.executable, "-m", "eagletwin", *words])}), flush=True)
        within = subprocess.run([sys.executable, "-c", WITHIN, *words], capture_output=True, text=True, check=False).stdout
        print(json.dumps({"draft": draft, "within": [line for line in within.splitlines() if "within" in line]}), flush=True)
        if asked.profile:
            _timed([sys.executable, "-c", PROFILED, str(asked.out / f"profile-{draft}.txt"), *words])
    if asked.profile:
        _imports(asked.out, words)


def _imports(out: Path, words: list[str]) -> None:
    """What importing takes, module by module."""
    imports = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "eagletwin", *words], capture_output=True, text=True, check=False
    )
    lines = [line for line in imports.stderr.splitlines() if line.startswith("import time:")][1:]
    lines.sort(key=lambda line: -int(line.split("|")[1]))
    (out / "imports.txt").write_text("\n".join(lines[:80]) + "\n")


def _timed(words: list[str]) -> dict[str, object]:
    """Wall and processor time of a whole process [s]."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, begin = os.times(), time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    said = (done.stdout or done.stderr).splitlines()
    return {"wall": round(time.monotonic() - begin, 1), "cpu": round(cpu, 1), "code": done.returncode, "says": said[:1]}


if __name__ == "__main__":
    main()
