"""A reproduction turns green: it has no candidate fix that its case does not need, and one that it has casts no doubt."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.regressions import LEDGER
from eagletwin.harness.check.known import Mends, entries_of
from eagletwin.harness.check.repro import write_script
from eagletwin.harness.commands.fuzz.looking import NO_BLOCK, CaseSeen
from eagletwin.harness.commands.fuzz.shrinking import Finding, Shrinking, Teller
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.core.versions import installed
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import INSTALLED, resolve

from . import forked
from .planted_trees import WORKER, plant

FILE, BEFORE, AFTER = WORKER
# Each position that a draft chain decodes at is one too large.
FAULT = FILE, BEFORE, AFTER.replace("self = self", "forward_batch.positions.add_(1)")
# Of a multi-layer worker, of pages, of prefills after a retraction: a chain in one request has none of that.
RIDING = ("multi-layer-chunk-tail-2", "row-overflow", "retracted-chunk-tail")
CASE: Case = replace(LEDGER["25015"].case, exercises=())
FINDING = "draft.positions (draft.decode)"


@dataclass(frozen=True)
class Found:
    tree: Path
    finding: Finding

    @property
    def script(self) -> Path:
        return self.finding.outcome.folder / "repro.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """The fault, as a search finds it in a case that it ran with candidate fixes of other bugs."""
    tree, folder = plant(tmp_path_factory.mktemp("tree"), FAULT), tmp_path_factory.mktemp("run")
    with Host(source=resolve(str(tree))) as host:
        mends = Mends(host, replace(DEFAULT_RUN, sglang=str(tree)))
        trial = mends.trials(entries_of(RIDING)).look_alone(CASE)
        assert str(trial.signature) == FINDING
        assert trial.header.idle_edits
        seen = CaseSeen(block=NO_BLOCK, case=CASE, verdict=trial.verdict, signature=trial.signature, mended=RIDING)
        teller = Teller(aside=lambda *_: None, news=print, look=print)
        shrinking = Shrinking(seen, mends, folder / "finding-1", seconds=0.0, seed=0, command="", teller=teller)
        shrinking.shrink(None)
        yield Found(tree, shrinking.conclude(1, 0.0))


def test_what_rides_along_is_dropped_also_where_time_is_up(found: Found) -> None:
    finding = found.finding
    assert finding.partial
    assert (finding.status, str(finding.signature)) == ("diverged", FINDING)
    assert (finding.run.workarounds, finding.facts["changes"]) == ((), [])
    assert ", with " not in finding.outcome.report.splitlines()[0]
    assert not any(name in found.script.read_text() for name in RIDING)


def test_it_is_1_on_the_broken_tree_and_0_on_the_release(found: Found, tmp_path: Path) -> None:
    broken = forked.script(found.script, cwd=tmp_path, source=resolve(str(found.tree)))
    assert broken.returncode == 1, broken
    fixed = forked.script(found.script, "--sglang", installed("sglang"), cwd=tmp_path, source=INSTALLED)
    assert fixed.returncode == 0, fixed
    assert f"Fixed: {FINDING} does not show on SGLang {installed('sglang')}." in fixed.stdout


# Of a function that the case calls, in a text that this SGLang does not have.
UNFIT = Patch(
    name="another text",
    edits=(
        Edit(
            target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
            match="no such text",
            replacement="nor this",
        ),
    ),
)


def script(folder: Path, run: RunSpec) -> Path:
    return write_script(folder, CASE, run, command="")


def test_a_workaround_that_is_not_called_or_does_not_fit_is_a_note(tmp_path: Path) -> None:
    """As on a tree that has the other bug fixed in a way of its own."""
    idle = LEDGER[RIDING[0]].remedy
    assert idle is not None
    file = script(tmp_path, RunSpec(finding=FINDING, workarounds=(idle, UNFIT)))
    done = forked.script(file, cwd=tmp_path, source=INSTALLED)
    assert done.returncode == 0, done
    assert f"Not needed here: nothing called what {idle.name} changes." in done.stdout
    assert "Left out: another text does not fit this SGLang." in done.stdout


@pytest.mark.parametrize(("patch", "code"), [(LEDGER[RIDING[0]].remedy, 125), (UNFIT, 129)])
def test_a_patch_under_test_that_is_not_called_or_does_not_fit_is_never_green(tmp_path: Path, patch: Patch, code: int) -> None:
    done = forked.script(script(tmp_path, RunSpec(finding=FINDING, patches=(patch,))), cwd=tmp_path, source=INSTALLED)
    assert done.returncode == code, done
