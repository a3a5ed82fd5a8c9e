"""Judge the patch of a finding like any other change of its engine: its test, its cost by counting, and searches.

`python -m tests.findings.change [--minutes M] [FOLDER …]`, or `make findings`: a line for each result. Without `--minutes` no
cost is counted and nothing is searched. The runs of searches are below `build/findings/`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from eagletwin.cases.entry import Entry, Known
from eagletwin.harness.commands.fuzz.coverage import has
from eagletwin.harness.commands.fuzz.tally import LEAST, MOST_UNDECIDED
from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings, encode_case
from eagletwin.harness.core.errors import EXIT_UNKNOWN, EagletwinError, HarnessError, InputError, run_guarded
from eagletwin.harness.core.run_spec import DEFAULT_ENGINE
from eagletwin.harness.core.terminal import each
from eagletwin.harness.core.verdict import DECLARED_VIEW

from .. import ledger
from .attempt import FINDINGS, REPORT, ROOT, Process, attempt, folders
from .counters import KINDS

OUT = ROOT / "build" / "findings"
EAGLETWIN = (sys.executable, "-P", "-m", "eagletwin")
# A search draws the prefix cache, mixed chunks, overlap and graphs on and off, and goes where the patch's statements run; the
# further ones look where it may not go. `plain-decode` runs the target without speculation too.
SEARCHES = {
    "guided by the patch": (),
    "mixed chunks, prefix cache": ("--only", "mixed-chunks,host-cache,sessions"),
    "plain decode": ("--only", "plain-decode"),
}
FOUND = {0: "nothing new", 1: "DIVERGED", 125: "unknown"}
# Two requests of which the second arrives as the first decodes, with the usual options of a server.
USUAL = Case(
    name="usual",
    model="llama-tiny",
    num_steps=2,
    requests=(
        Request(id="a", prompt=(7, 5, 3), max_new_tokens=12),
        Request(id="b", prompt=(9, 2), max_new_tokens=8, arrive=2),
    ),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True)),
)
_COUNT = {
    "name": "counted",
    "edits": [
        {
            "target": "sglang.srt.managers.scheduler.Scheduler.run_batch",
            "match": "self.forward_ct += 1",
            "replacement": "self.forward_ct += 1\n__import__('counters').begin(self, batch.forward_mode.name)",
        }
    ],
}
SECONDS = 300  # a batch takes 20 times as long when its lines are counted
Counts = dict[str, list[float]]  # kind of batch -> mean counts of its batches, as KINDS


def _needs(bug: Known) -> list[str]:
    """The options without which the bug is not there."""
    return bug.needs.options.split() if isinstance(bug, Entry) and bug.needs is not None and not bug.needs.device else []


# Features that a search has when it is asked for them alone; in vLLM, of which nothing was measured, those that few cases have.
_ASKED_FOR = {"sglang": ("dp-attention",), "vllm": ("model-runner=v1", "eagle3", "mimo")}


def _only(bug: Known) -> list[str]:
    """The options by which a search runs such code as the bug's own case does."""
    names = [name for name in _ASKED_FOR[bug.engine] if isinstance(bug, Entry) and has(bug.case, name)]
    return [word for name in names for word in ("--only", name)]


def searched(bug: Known, patch: Path, minutes: float) -> Iterator[tuple[str, int]]:
    """A line on each search and its exit code, and one on all of them: in ten cases the patch must have run, whichever search
    they are of. A search that only ran the patch too seldom has 0."""
    chosen = SEARCHES if bug.engine == DEFAULT_ENGINE else {"guided by the patch": ("--engine", bug.engine)}
    view = ["--view", bug.within] if isinstance(bug, Entry) and bug.within != DECLARED_VIEW else []  # in which the fix is right
    reached = 0
    for number, (name, own) in enumerate(chosen.items()):
        words = [*own, *view, *([] if number else [*_needs(bug), *_only(bug)])]
        command = [*EAGLETWIN, "fuzz", "--patch", str(patch), "--minutes", str(minutes), "--json", "--out", str(OUT), *words]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        facts = json.loads(done.stdout)
        summary = facts.get("summary", {"headline": facts.get("error", facts.get("said")), "tally": {}, "known": []})
        tally = summary["tally"]
        undecided = max(tally.get("undecided", 0), tally.get("gaps", 0)) > MOST_UNDECIDED * tally.get("cases", 0)
        # also of a crash the code is 125, and a patch may keep an engine from starting
        broken = tally.get("lost") or any(summary.get(name) for name in ("findings", "unconfirmed", "refused"))
        seldom = done.returncode == EXIT_UNKNOWN and not (undecided or broken) and tally.get("reached", LEAST) < LEAST
        reached += tally.get("reached", 0)
        line = f"{'nothing new' if seldom else FOUND.get(done.returncode, f'error {done.returncode}')}: {summary['headline']}"
        if known := [bug["id"] for bug in summary["known"] if bug["cases"]]:
            line += f"; known bugs: {', '.join(known)}"
        if done.returncode and not seldom:
            line += f"; {facts.get('folder')}"
        yield f"  search, {name}: {line}", 0 if seldom else done.returncode
    few = reached < LEAST
    yield f"  {reached} cases ran the patch{_out_of_reach(bug) * few}", EXIT_UNKNOWN if few else 0


def _out_of_reach(bug: Known) -> str:
    """Why no search on a CPU runs the bug's code; empty: one may."""
    if not isinstance(bug, Entry):
        return ": no case runs this code, a probe calls it"
    return f": this code needs --device {bug.needs.device}" if bug.needs is not None and bug.needs.device else ""


def costs(bug: Known, patch: Path) -> dict[str, tuple[Counts, Counts]]:
    """The counts of the usual case, and of the bug's own where it has one, on the release and with the patch. Of SGLang alone:
    its batches are counted."""
    if bug.engine != DEFAULT_ENGINE:
        return {}
    cases: dict[str, tuple[Case, tuple[str, ...]]] = {"usual": (USUAL, ("--overlap",))}
    if isinstance(bug, Entry) and (bug.needs is None or not (bug.needs.device or bug.needs.pp > 1)):
        cases["own"] = bug.case, (*_needs(bug),)
    return {name: (_counted(*each, None), _counted(*each, patch)) for name, each in cases.items()}


@cache  # of the usual case without a patch, which every folder wants
def _counted(case: Case, options: tuple[str, ...], patch: Path | None) -> Counts:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "case.json").write_bytes(encode_case(case))
        (place / "count.json").write_text(json.dumps(_COUNT), encoding="utf-8")
        counts = place / "counts"
        words = [*EAGLETWIN, "check", "case.json", "--patch", "count.json", "--out", folder, *options]
        words += ["--patch", str(patch)] if patch else []
        paths = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = os.environ | {"PYTHONPATH": paths, "EAGLETWIN_COUNTS": str(counts)}
        words += ["--case-timeout", str(SECONDS)]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if not counts.exists() and done.returncode == EXIT_UNKNOWN:  # no batch came to its end
            return {}
        if not counts.exists():
            raise HarnessError(
                f"{case.name} was not counted: {(done.stderr or done.stdout)[-500:]}",
                consequence="the cost of the patch is unknown",
                remedy=f"run {' '.join(words)}",
            )
        lines = [json.loads(line) for line in counts.read_text(encoding="utf-8").splitlines()]
    first = [line for line in lines if line["process"] == lines[0]["process"]]  # without the runs that confirm a verdict
    first = [*{line["number"]: line for line in first}.values()]  # the last of each batch
    kinds = {line["kind"]: [one for one in first if one["kind"] == line["kind"]] for line in first}
    return {name: [sum(one[kind] for one in those) / len(those) for kind in KINDS] for name, those in kinds.items()}


def cost_lines(found: dict[str, tuple[Counts, Counts]]) -> list[str]:
    """A line for each kind of batch of each case: what a batch costs more with the patch, of how much."""
    lines = []
    for case, (before, after) in found.items():
        lines += [f"  cost, {case} case: no batch ends without the patch"] if not before else []
        for kind in before.keys() & after.keys():
            parts = (
                f"{name} {new - old:+.0f} of {old:.0f}" for name, old, new in zip(KINDS, before[kind], after[kind], strict=True)
            )
            lines.append(f"  cost, {case} case, {kind.lower()}: {', '.join(parts)}")
    return sorted(lines)


def _results(bug: Known, folder: Path, minutes: float, process: Process) -> Iterator[tuple[str, int]]:
    """Each line, and the exit code that it means."""
    patch = folder / REPORT
    yield attempt(folder, process).line(), 0
    if minutes:
        yield from ((line, 0) for line in cost_lines(costs(bug, patch)))
        yield from searched(bug, patch, minutes)


def main(words: Sequence[str] = ()) -> int:
    """Every folder, or those that are named. 0: upstream can take them; 1: a test or a patch is wrong; 125: a search could not
    tell. Raises InputError for a name that is no folder's."""
    minutes, names = (float(words[1]), words[2:]) if words[:1] == ["--minutes"] else (0.0, words)
    found = [folder for folder in folders() if not names or folder.name in names]
    unknown = sorted({*names} - {folder.name for folder in found})
    if unknown or not found:
        raise InputError(
            f"{FINDINGS} has no folder{' ' * bool(unknown)}{', '.join(unknown)}",
            consequence="no finding was tried",
            remedy="name folders of it, or none for all" if unknown else "run it in a whole checkout",
        )
    codes = {0}
    with Process() as process:
        for folder in each(found, "findings", lambda folder: folder.name):
            try:
                for line, code in _results(ledger.wanted()[folder.name], folder, minutes, process):
                    print(line, flush=True)
                    codes.add(code)
            except EagletwinError as error:
                codes.add(1)
                print(f"{folder.name:26} WRONG\nerror: {error}", flush=True)
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:])))
