"""A reproduction turns green: it has no candidate fix that its case does not need, and one that it has casts no doubt."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.known import Mends, entries_of
from eagletwin.harness.check.repro import write_script
from eagletwin.harness.commands.fuzz.looking import NO_BLOCK, CaseSeen
from eagletwin.harness.commands.fuzz.shrinking import Finding, Shrinking, Teller
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.environment import installed
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import INSTALLED, resolve
from eagletwin.harness.testing.twin import CaseFailed, Twin

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


def conclude(mends: Mends, case: Case, riding: tuple[str, ...], folder: Path) -> Finding:
    """What a search keeps of a case that it ran with candidate fixes of other bugs, where it has no time to make it smaller."""
    trial = mends.trials(entries_of(riding)).look_alone(case)
    assert trial.signature is not None
    seen = CaseSeen(block=NO_BLOCK, case=case, verdict=trial.verdict, signature=trial.signature, mended=riding)
    teller = Teller(aside=lambda *_: None, news=print, look=print)
    shrinking = Shrinking(seen, mends, folder / "finding-1", seconds=0.0, seed=0, command="", teller=teller)
    shrinking.shrink(None)
    return shrinking.conclude(1, 0.0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """The fault of a tree."""
    tree, folder = plant(tmp_path_factory.mktemp("tree"), FAULT), tmp_path_factory.mktemp("run")
    with Host(source=resolve(str(tree))) as host:
        yield Found(tree, conclude(Mends(host, replace(DEFAULT_RUN, sglang=str(tree))), CASE, RIDING, folder))


def test_what_rides_along_is_dropped_also_where_time_is_up(found: Found) -> None:
    finding = found.finding
    assert finding.partial
    assert (finding.status, str(finding.signature)) == ("diverged", FINDING)
    assert (finding.run.workarounds, finding.facts.changes) == ((), [])
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


@pytest.mark.long
def test_a_candidate_fix_without_which_a_known_bug_shows_first_stays(host: Host, tmp_path: Path) -> None:
    """A multi-layer worker that consumes a wrong token at a chunk's end, and a fault of ours in the same case."""
    tail = LEDGER[RIDING[0]]
    worker = "sglang.srt.speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker"
    backup = "next_token_ids_backup = batch_result.next_token_ids.clone()"
    edit = Edit(target=f"{worker}._draft_extend_for_decode", match=backup, replacement=backup.removesuffix(".clone()"))
    case = replace(tail.case, exercises=(), requests=(Request(id="a", prompt=(7, 19, 3, 5), max_new_tokens=4),))
    mends = Mends(host, replace(DEFAULT_RUN, patches=(Patch(name="planted", edits=(edit,)),)))
    finding = conclude(mends, case, (RIDING[1], tail.id, RIDING[2]), tmp_path)
    assert finding.signature.rule != tail.rule
    assert (finding.run.workarounds, finding.facts.changes) == ((tail.remedy,), ["--remedy", tail.id])


def test_a_test_that_fails_keeps_no_candidate_fix_that_it_does_not_need(host: Host, tmp_path: Path) -> None:
    entry, remedy = LEDGER["25015"], LEDGER[RIDING[0]].remedy
    assert entry.revert is not None
    assert remedy is not None
    twin = Twin(tmp_path)
    twin.host = host
    twin.begin("case", patches=(entry.revert, remedy))
    with pytest.raises(CaseFailed) as failed:
        twin.check(CASE)
    outcome = twin.conclude(failed.value)
    assert outcome.verdict.status == "diverged"
    text = (outcome.folder / "repro.py").read_text()
    assert remedy.name not in text
    assert f"finding='{failed.value.trial.signature}'" in text
