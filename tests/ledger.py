"""What is derived from the ledger: rows of documents, the file for SGLang's own CI, reports of findings with patches.

`python -m tests.ledger` writes it, in a document between two comments; tests/harness/test_ledger.py and
tests/findings/test_folders.py compare.
"""

import ast
import re
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from eagletwin.cases import ledger
from eagletwin.cases.entry import Entry, Known, Probe
from eagletwin.cases.ledger import ENTRIES, LEDGER, PROBES
from eagletwin.cases.reach import on_a_cpu, why_unreachable
from eagletwin.harness.core.run_spec import ENGINES, TITLES, Engine
from eagletwin.harness.core.verdict import DECLARED_VIEW
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.families import RECIPES
from eagletwin.harness.judge.rules import catalogue

from .findings.attempt import BELOW, FINDINGS, REPORT, patched, root_of
from .findings.attempt import changed as files_of
from .upstream.attempt import TEST, changed_files, diff_of, name_of_test

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COMMAND = "python -m tests.ledger"
_MADE = f"As `{COMMAND}` writes it; "
_PATCH = "\n## Patch\n\n"
Files = dict[Path, str]  # and what stands in each
KNOWN: tuple[Known, ...] = (*LEDGER.values(), *PROBES.values())  # of SGLang, whose flags and recordings documents list
_ALL: tuple[Known, ...] = (*ENTRIES.values(), *PROBES.values())

# A bug's section is the first one of whose words its trigger has one.
SECTIONS = {
    "Streaming sessions: `--enable-streaming-session`": ("--enable-streaming-session",),
    "Pipelines: `--pp-size` above 1": ("--pp-size",),
    "STANDALONE: a plain language model as draft": ("STANDALONE",),
    "Multi-layer EAGLE: `--enable-multi-layer-eagle`": ("multi-layer",),
    "Qwen3-Next, Qwen3.5, Nemotron-H: layers that keep a state": ("layers of ", "keep a state", ", states,", "Qwen3-Next"),
    "Latent attention (DeepSeek, Kimi K2), on a GPU": ("latent attention", "flashmla"),
    "Gemma-4 with its assistant": ("Gemma-4",),
    "An attention backend other than Triton": ("FlashAttention", "DeepSeek-V4 backend", "DSA backend"),
    "Sampling (temperature above 0)": ("rejection-sampling", "temperature", "a request that samples"),
    "Trees: `--speculative-eagle-topk` above 1": ("topk >", "topk *"),
    "Any EAGLE or EAGLE-3 server": ("",),
}
# What a recording of integers has not, by the rule that compares it. Integers show the bugs of other rules by these themselves.
UNRECORDED = {
    **dict.fromkeys(("draft.kv", "target.kv", "target.hidden", "draft.hidden_in"), "what made a row is in the row alone"),
    **dict.fromkeys(("target.state", "state.tracked"), "a layer's state is not recorded"),
    "draft.selection": "which rows a row attends to is not recorded",
    "draft.proposal": "which token a row proposes depends on its logits",
    **dict.fromkeys(
        ("verify.accept", "verify.probabilities", "grammar.mask"), "which token a request may be given depends on its logits"
    ),
    "output.hidden": "which hidden states a request is given is not recorded",
    "output.logprobs": "what a request is told of probabilities is not recorded",
    "output.stream": "the messages of a request are not recorded",
}
# A server that these rules catch ends, or has no number of a request that is wrong.
_OF_NO_REQUEST = {"engine.crash", "engine.hang", "kernel.memory", "schedule.events", "session.rows", "pool.accounting"}
# How a report's harm begins, the gravest first.
_HARMS = (
    *("wrong output, and the server ends", "wrong output", "the server ends", "the server hangs", "a request is aborted"),
    *("writes out of bounds", "reads out of bounds", "wrong metadata", "lower accept length"),
)


def recorded(entry: Entry) -> str:
    """The rule by which a recording of integers shows a bug, or why none does; empty: its case is none of a server that is
    recorded, or is judged in a view of its own."""
    if entry.recorded:
        return entry.recorded
    in_view = entry.view is not None or entry.within != DECLARED_VIEW
    several = on_a_cpu(entry).pp > 1 or entry.case.engine.sglang.attn_dp_size > 1
    if in_view or several or RECIPES[entry.case.model].frozen or entry.rule in _OF_NO_REQUEST:
        return ""
    return UNRECORDED.get(entry.rule, entry.rule)


def by_flags() -> str:
    """docs/guide/acceptance-fell.md: each bug in the section of its flags."""
    lines = []
    for name in reversed(SECTIONS):
        rows = [_by_flags(bug) for bug in KNOWN if _section(bug) == name]
        head = ["| entry | releases | it matters with | rule | `prove` with |", "|---|---|---|---|---|"]
        lines += [f"### {name}", "", *head, *rows, ""]
    return "\n".join(lines)


def _section(bug: Known) -> str:
    return next(name for name, words in SECTIONS.items() if any(word in bug.trigger for word in words))


def _by_flags(bug: Known) -> str:
    releases = bug.buggy if bug.fixed else f"since {bug.buggy.rstrip(' -')}"
    options = bug.needs.options if isinstance(bug, Entry) and bug.needs is not None else ""
    options = bug.command if isinstance(bug, Probe) else options
    return f"| `{bug.id}` | {releases} | {bug.trigger} | `{bug.rule}` | {f'`{options}`' if options else ''} |"


def by_recording() -> str:
    """docs/guide/recording.md: which bugs integers show, and why they do not show others."""
    found = dict[str, list[str]]()
    for entry in LEDGER.values():
        if not why_unreachable(entry, on_a_cpu(entry)):
            found.setdefault(recorded(entry), []).append(f"`{entry.id}`")
    return "\n".join(
        [
            "A recording shows these bugs of the ledger that a CPU reaches:",
            "",
            "| rule | bugs |",
            "|---|---|",
            *(f"| `{rule}` | {', '.join(names)} |" for rule, names in found.items() if rule in catalogue()),
            "",
            "It does not show these, for which [acceptance](acceptance.md) compares the rounds, `judge --target --draft` "
            "drafts and rows, and `check` the numbers:",
            "",
            "| why | bugs |",
            "|---|---|",
            *(f"| {why} | {', '.join(names)} |" for why, names in found.items() if why and why not in catalogue()),
            "",
        ]
    )


def folder_of(bug: Known) -> str:
    """The folder of a bug in docs/findings: entries that show one fault with 2 layers and with 3, or in a worker or its graphs
    beside a call, share it."""
    return re.sub(r"-([23]|worker|graphs)$", "", bug.id)


def by_harm() -> str:
    """docs/findings/README.md: of each engine findings that upstream can take, those of default flags first, then by harm; and
    live bugs that have no folder. What a report does not say is empty."""
    return "\n".join(f"### {TITLES[engine]}\n\n{_by_harm(engine)}" for engine in ENGINES)


def _by_harm(engine: Engine) -> str:
    live = {folder_of(bug): bug for bug in reversed(_ALL) if not bug.fixed and bug.engine == engine}
    rows = sorted((*_harm(name)[:2], name, *_harm(name)[2:]) for name in live if (FINDINGS / name).is_dir())
    without = [f"`{name}` ({bug.title})" for name, bug in sorted(live.items()) if not (FINDINGS / name).is_dir()]
    lines = [
        f"| [{name}]({name}/report.md) | {_title(name)} | {'no' if rare else 'yes'} | {harm} | {threads} |"
        for rare, _, name, harm, threads in rows
    ]
    head = ["| finding | | by default | harm | related threads |", "|---|---|---|---|---|"]
    return "\n".join(
        [*head, *lines, "", *([f"Live entries that have no folder: {'; '.join(without)}.", ""] if without else [])]
    )


def _harm(folder: str) -> tuple[bool, int, str, str]:
    """Whether default flags do not reach a bug, the rank of its harm, the harm, and related public threads, by its report."""
    file = FINDINGS / folder / REPORT
    report = file.read_text(encoding="utf-8") if file.exists() else ""
    said = dict(re.findall(r"\*\*(Harm\.|Reported before\?)\*\* ((?:.+\n)+)", report))
    harm, reported = said.get("Harm.", ".\n")[:-2], said.get("Reported before?", "")
    rank = next((rank for rank, words in enumerate(_HARMS) if harm.lower().startswith(words)), len(_HARMS))
    threads = [] if reported.startswith("No") else re.findall(r"#\d+", reported)
    return "\nBy default: yes" not in report, rank, harm, ", ".join(dict.fromkeys(threads))


def _title(folder: str) -> str:
    report = FINDINGS / folder / REPORT
    first = report.read_text(encoding="utf-8").partition("\n")[0] if report.exists() else report_of(folder)
    return first.partition("\n")[0].removeprefix("# [Bug] ")


def upstream() -> str:
    """docs/guide/upstream/test_eagle_draft_chain.py: a test for each fix that a CPU reaches."""
    tests = []
    for entry in LEDGER.values():
        if entry.fixed and not why_unreachable(entry):
            title = textwrap.fill(entry.title, 80, initial_indent="    # ", subsequent_indent="    # ")
            tests.append(f'{title}\n    def {name_of_test(entry.id)}(self):\n        self._assert_fixed("{entry.id}")\n')
    return "\n" + "\n".join(tests) + "\n"


def fix_of(bug: Known) -> str:
    """The last section of a report: the candidate fix as a patch of the newest release."""
    assert bug.remedy is not None
    changed = changed_files(root_of(bug.engine), bug.remedy.edits)
    return f"{_PATCH}{_MADE}`git apply` takes this file.\n\n```diff\n{diff_of(changed, _below(bug))}```\n"


def _below(bug: Known) -> str:
    """What stands before the package in a checkout."""
    return BELOW[bug.engine].removesuffix(f"{bug.engine}/")


def wanted() -> dict[str, Known]:
    """Folders that docs/findings must have, and their bugs: live ones with a candidate fix which a CPU can try. Bugs that a GPU
    alone shows may have one. Of several in one folder: the one of its name."""
    return {
        folder_of(bug): bug
        for bug in (*reversed(_ALL), *(one for one in _ALL if one.id == folder_of(one)))
        if not bug.fixed
        and bug.remedy is not None
        and (isinstance(bug, Probe) or bug.needs is None or bug.needs.device != "cuda" or (FINDINGS / folder_of(bug)).is_dir())
    }


def says_the_same(bug: Known, patch: Path) -> bool:
    """Whether a report's patch makes of the newest release the code of the candidate fix, whatever its comments and layout."""
    assert bug.remedy is not None
    try:
        changed = changed_files(root_of(bug.engine), bug.remedy.edits)
    except (ValueError, StopIteration, FileNotFoundError):  # it edits what another class or another release has
        return False
    if {f"{_below(bug)}{file}" for file in changed} != {*files_of(patch)}:
        return False
    by_hand = patched(patch)
    return all(ast.dump(ast.parse(after)) == ast.dump(ast.parse(by_hand[file])) for file, (_, after) in changed.items())


def report_of(folder: str) -> str:
    """The first report of a finding, of all that its entry says."""
    bug, test = wanted()[folder], f"test_{folder.replace('-', '_')}.py"
    modules = [vars(import_module(f"{ledger.__name__}.{one.name}")) for one in iter_modules(ledger.__path__)]
    about = next(one["__doc__"] for one in modules if bug in one.get("ENTRIES", ()) or bug is one.get("ENTRY"))
    return f"""# [Bug] {bug.title}

## Describe the bug

**Harm.** To be written: one of {", ".join(_HARMS)}.

{about.strip()}

**Who is hit.** {bug.trigger}.

**Since when.** {bug.buggy.rstrip(" -")}.

**Fix.** The patch below.

**Reported before?** Not searched.

## Reproduction

[{test}]({test}) runs the engine's own code on a CPU, without a checkpoint.
In an installed checkout, and with this folder at `FINDING`:

```
python FINDING/{test}     # fails
git apply FINDING/report.md
python FINDING/{test}     # passes
```

## Environment

{TITLES[bug.engine]} {releases(bug.engine)[-1]}, Python 3.11, Linux, CPU; no GPU and no checkpoint are needed.
"""


def documents() -> Files:
    """Documents, with what the ledger says in them. README has the number of findings."""
    texts = {
        DOCS / "guide/acceptance-fell.md": by_flags(),
        DOCS / "guide/recording.md": by_recording(),
        FINDINGS / "README.md": by_harm(),
        TEST: upstream(),
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ready = re.sub(r"^  \d+ bugs have a report", f"  {len(wanted())} bugs have a report", readme, flags=re.MULTILINE)
    return {file: _between(file, text) for file, text in texts.items()} | {ROOT / "README.md": ready}


def findings() -> Files:
    """Reports with the candidate fixes of entries as patches. A patch of another fix, or of one that is written in another way,
    is by hand."""
    files: Files = {}
    for name, bug in wanted().items():
        report = FINDINGS / name / REPORT
        text, _, patch = (report.read_text(encoding="utf-8") if report.exists() else report_of(name)).partition(_PATCH)
        if not patch or patch.startswith(_MADE) or says_the_same(bug, report):
            files[report] = text + fix_of(bug)
    return files


def _between(file: Path, text: str) -> str:
    """A file with this between its two comments."""
    begin, end = rf"^.*{COMMAND} writes .*\n", r"^.*end of what it writes.*\n"
    parts = re.split(rf"({begin})[\s\S]*({end})", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return "".join((parts[0], parts[1], text, *parts[2:]))


def stale(files: Files) -> list[str]:
    """Those that are not as the ledger has them."""
    return [
        str(file.relative_to(ROOT))
        for file, text in files.items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Write what differs, and name what is to be written by hand."""
    for write in (findings, documents):  # the index has the titles of reports
        files = write()
        for name in stale(files):
            (ROOT / name).parent.mkdir(exist_ok=True)
            (ROOT / name).write_text(files[ROOT / name], encoding="utf-8")
            print(f"{name} written")
    for name in wanted():
        test = FINDINGS / name / f"test_{name.replace('-', '_')}.py"
        if not test.exists():
            print(f"{test.relative_to(ROOT)} is to be written: a test that the engine's project can take (CONTRIBUTING.md)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
