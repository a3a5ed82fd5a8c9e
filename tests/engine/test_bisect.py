"""Bisection on the real worker: over features of a planted fault, over published releases, over commits made of them."""

import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from eagletwin.harness.commands.bisect.measure import reduce_case
from eagletwin.harness.commands.bisect.state import Subject
from eagletwin.harness.commands.result import BisectFacts
from eagletwin.harness.core.patch import read_patch
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.provision import NotFetched
from eagletwin.harness.engines.source import resolve
from eagletwin.harness.families.valid import read_case

from .history import History
from .warm import eagletwin

EXAMPLES = Path(__file__).parents[2] / "docs/guide/examples"


def release(name: str) -> Path:
    """The folder of a release; skips the test where it is not in the cache and cannot be fetched."""
    try:
        return resolve(name).paths[0]
    except NotFetched as error:
        pytest.skip(error.cause)


def words_of(line: str, cwd: Path) -> list[str]:
    """What a shell that runs the line hands to the one command of eagletwin in it."""
    told = f"eagletwin() {{ printf '%s\\n' \"$@\" >&3; }}\n{{ {line}; }} 3>&1 >/dev/null"
    return subprocess.check_output(["bash", "-c", told], cwd=cwd, text=True).splitlines()


@pytest.mark.long
def test_a_fault_that_needs_pages_and_two_requests_is_said_to_need_exactly_these(host: Host, tmp_path: Path) -> None:
    """The example of docs/guide/bisect.md."""
    case, fault = read_case(EXAMPLES / "busy.json"), read_patch(EXAMPLES / "fault.json")
    subject = Subject(case=case, run=RunSpec(patches=(fault,)))
    found = reduce_case(host, subject, "", tmp_path, print)
    assert [feature.words for feature in found.reduced.needed] == ["several requests", "pages"]
    assert {feature.words for feature in found.reduced.gone} == {"late arrivals", "several steps", "prefix cache", "chunks"}
    assert found.reduced.answered
    assert found.reduced.fault is not None
    assert found.reduced.fault.rule == "draft.hidden_in"
    assert found.control is not None
    assert found.control.usual.status == "equal"
    assert found.interpreted is not None
    assert found.interpreted.usual.rule == "draft.hidden_in"


def test_over_releases_the_first_with_the_fix_is_named(tmp_path: Path) -> None:
    for name in ("0.5.10.post1", "0.5.11", "0.5.12"):
        release(name)
    done = eagletwin("bisect", "25015", "--from", "0.5.10.post1", "--to", "0.5.12", "--json", cwd=tmp_path)
    assert done.returncode == 0, done
    found = msgspec.json.decode(done.stdout, type=BisectFacts)
    assert (found.answer, found.exit_code) == ("FIXED WITH 0.5.12", 0)
    assert found.report.startswith("FIXED WITH 0.5.12  pr-25015: draft.positions at request a, round 0, draft.decode step 1\n")
    assert "0.5.11 shows it, and 0.5.12 no longer does: the first good release is 0.5.12." in found.report
    assert "3 of 3 releases looked at, the case run 9 times" in found.report
    assert "\nFIXED WITH 0.5.12  pr-25015" in done.stderr  # what people read


@pytest.mark.long
def test_git_bisect_over_the_trees_of_releases_says_the_same_and_skips_what_does_not_import(tmp_path: Path) -> None:
    history = History(tmp_path / "sglang")
    old, new = (history.tree_of(release(name)) for name in ("0.5.11", "0.5.12"))
    broken = history.with_file(new, "version.py", "raise ImportError('planted')\n")
    trees = {"0.5.11": old, "0.5.12": new, "does not import": broken, "0.5.12 again": new}
    for subject, tree in trees.items():
        history.commit(subject, tree, transformers="5.6.0")
    done = eagletwin("bisect", "25015", "--git", str(history.path), "main", history.commits[0], cwd=tmp_path)
    assert done.returncode == 0, done
    fixed = history.git("log", "-1", "--format=%h %s", history.commits[1])
    assert done.stdout.startswith(f"FIXED WITH {fixed}  pr-25015: draft.positions at request a, round 0, draft.decode step 1\n")
    assert "does not import  skipped: SGLang cannot be imported: ImportError: planted" in done.stdout
    assert len(history.git("worktree", "list").splitlines()) == 1
    for word, code in (("bad", 1), ("good", 0)):  # each in a worktree of its own, which stays
        typed = re.search(rf"^  {word}: +(.+)$", done.stdout, re.MULTILINE)
        assert typed is not None
        assert eagletwin(*words_of(typed[1], tmp_path), cwd=tmp_path).returncode == code
