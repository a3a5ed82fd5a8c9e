"""Older releases, if they are in the cache: their traces hold all that the installed one's do, of each of their workers."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER, PROBES
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.commands.prove.proof import prove_on_wheels
from eagletwin.harness.commands.result import BisectFacts
from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Limits, RunSpec
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.judge.judge import judge

from ..lab.gpu.faults import batch_of
from ..rows import long
from . import warm
from .older import BUSY, PROMPT, host_of
from .test_graphs import in_production

# One release of each generation of SGLang, if it is in the cache: its traces hold all that the installed one's hold.
# `eagletwin info releases fetch` brings the releases. docs/explanation/eras.md says what differs between them.


# To start one takes ten seconds of a core: all that `make test` does with a release is in this file.
GENERATIONS = ("0.5.13.post1", *long("0.5.15.post1", "0.5.17"), "0.5.20")
TREE = replace(BUSY, topk=2, num_draft_tokens=5, chunked_prefill_size=8)


@pytest.fixture(scope="module", params=GENERATIONS)
def older(request: pytest.FixtureRequest) -> Iterator[Host]:
    with host_of(request.param) as host:
        yield host


def held(trace: Trace) -> set[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """What the records of each stage hold."""
    return {(record.stage, tuple(sorted(record.tensors)), tuple(sorted(record.numbers))) for record in trace.header.records}


def test_an_older_release_is_seen_as_fully_as_the_installed_one(host: Host, older: Host, tmp_path: Path) -> None:
    traces = []
    for name, of in (("installed", host), ("older", older)):
        (tmp_path / name).mkdir()
        traces.append(of.engine(TREE).run(TREE, tmp_path / name, Limits()))
    verdicts = [judge(trace) for trace in traces]
    assert [verdict.status for verdict in verdicts] == ["equal", "equal"], verdicts
    assert held(traces[0]) == held(traces[1])
    assert verdicts[0].exercised == verdicts[1].exercised
    assert {"tree", "radix_hit", "retraction", "chunked_prefill"} <= set(verdicts[0].exercised)


@pytest.mark.parametrize("entry", ["26329", *long("25015", "26997-kv")])
def test_what_was_fixed_before_is_fixed_in_an_older_release(older: Host, entry: str, tmp_path: Path) -> None:
    case = LEDGER[entry].case
    verdict = judge(older.engine(case).run(case, tmp_path, Limits()))
    assert verdict.status == "equal", verdict


def test_what_is_live_shows_in_an_older_release(older: Host, tmp_path: Path) -> None:
    case = LEDGER["multi-layer-chunk-tail-2"].case
    verdict = judge(older.engine(case).run(case, tmp_path, Limits()))
    # 0.5.20 does not get that far: ledger entry multi-layer-pp-proxy
    expected = ("unknown", "engine.crash") if older.version == "0.5.20" else ("diverged", "draft.input_ids")
    assert (verdict.status, verdict.rule) == expected


@pytest.mark.parametrize("older", ["0.5.20", *long("0.5.17")], indirect=True)
def test_it_runs_as_users_run_it(older: Host) -> None:
    """With graphs, overlap and the branches of CUDA."""
    trial = Trials(older, RunSpec()).look_alone(in_production(batch_of(3, "llama-tiny")))
    assert (trial.verdict.status, trial.verdict.unseen) == ("equal", {})


@pytest.mark.long
def test_deterministic_inference_runs(older: Host, tmp_path: Path) -> None:
    case = replace(BUSY, events=(), engine=EngineSettings(sglang=SGLangSettings(deterministic=True)))
    verdict = judge(older.engine(case).run(case, tmp_path, Limits()))
    assert verdict.status == "equal", verdict


# The two workers of the releases up to 0.5.12.post1, if that one is in the cache: spec v2 under the overlap scheduler, for
# chains, and spec v1, for trees. docs/explanation/eras.md says what shows there.


RELEASE = "0.5.12.post1"
OLDER_TREE = Case(
    name="tree",
    model="llama-tiny",
    num_steps=2,
    topk=3,
    num_draft_tokens=5,
    requests=(Request(id="a", prompt=PROMPT, max_new_tokens=8), Request(id="b", prompt=PROMPT[:4], max_new_tokens=5)),
)
# Pull request #27738, which was never merged: the Triton backend's plan of a draft extend of spec v1 names the accepted rows as
# prefix too, and its kernel takes them once more from its input.
PREFIX_ONLY = Patch(
    name="fix-27738",
    edits=(
        Edit(
            target="sglang.srt.layers.attention.triton_backend.TritonAttnBackend.init_forward_metadata",
            match="forward_batch.seq_lens,\n                None,",
            replacement="forward_batch.seq_lens - spec_info.num_accept_tokens, None,",
        ),
    ),
)


@pytest.fixture(scope="module")
def old() -> Iterator[Host]:
    with host_of(RELEASE) as host:
        yield host


def test_a_chain_runs_under_the_overlap_scheduler_and_all_of_it_is_judged(old: Host, tmp_path: Path) -> None:
    trace = old.engine(BUSY).run(BUSY, tmp_path)
    engine, verdict = trace.header.engine, judge(trace)
    assert (engine.worker, engine.overlap) == ("EAGLEWorkerV2", True)
    assert verdict.status == "equal", verdict
    assert {"radix_hit", "retraction", "batch", "abort_in_decode", "accept_some"} <= set(verdict.exercised)


def test_a_request_under_overlap_takes_part_in_one_round_after_its_last_and_its_output_is_cut_off(
    old: Host, tmp_path: Path
) -> None:
    case = LEDGER["25015"].case
    trace = old.engine(case).run(case, tmp_path)
    rounds = [record.round for record in trace.header.records if record.stage == "verify"]
    assert rounds == [0, 1]  # two tokens: the prefill's, and one of the first round
    assert judge(trace).status == "equal"


@pytest.mark.long
def test_an_abort_that_comes_a_step_late_is_seen_under_overlap_too(old: Host, tmp_path: Path) -> None:
    """A running request has one step under way when the abort comes, and no other."""
    late = "if self.to_finish and setattr(self, 'late', getattr(self, 'late', 0) + 1) is None and self.late > 1:"
    finish = "sglang.srt.managers.schedule_batch.Req.check_finished"
    fault = Patch(name="late-abort", edits=(Edit(target=finish, match="if self.to_finish:", replacement=late),))
    case = replace(
        BUSY,
        requests=(Request(id="a", prompt=(7, 9), max_new_tokens=20), Request(id="c", prompt=(5,), max_new_tokens=20)),
        events=(Event(at=3, kind="abort", request="c"),),
    )
    for name, patches, expected in (("as-released", (), ("equal", "")), ("late", (fault,), ("diverged", "schedule.events"))):
        (tmp_path / name).mkdir()
        verdict = judge(old.engine(case, patches).run(case, tmp_path / name))
        assert (verdict.status, verdict.rule) == expected, verdict


def test_a_tree_runs_on_the_older_worker_whose_draft_extend_attends_twice_to_its_own_rows(old: Host, tmp_path: Path) -> None:
    (tmp_path / "as-released").mkdir()
    trace = old.engine(OLDER_TREE).run(OLDER_TREE, tmp_path / "as-released")
    verdict = judge(trace)
    assert trace.header.engine.worker == "EAGLEWorker"
    assert verdict.first is not None
    assert (verdict.rule, verdict.first.stage) == ("draft.hidden_in", "extend")
    (tmp_path / "with-fix").mkdir()
    fixed = judge(old.engine(OLDER_TREE, (PREFIX_ONLY,)).run(OLDER_TREE, tmp_path / "with-fix"))
    assert fixed.status == "equal", fixed
    assert "tree" in fixed.exercised


def test_trees_in_pages_are_refused_there(old: Host) -> None:
    with pytest.raises(WouldNotStart, match="page_size > 1"):
        old.engine(replace(OLDER_TREE, page_size=4, chunked_prefill_size=64))


VERIFY = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify"
# What PR #26997 brought, in the words of this release.
MOVED = """width = self.speculative_num_draft_tokens
pool = self.target_worker.model_runner.token_to_kv_pool
for n in range(bs):
    nodes, front = accept_index[n][: int(accept_lens[n])].long(), slice(n * width, n * width + int(accept_lens[n]))
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[batch.out_cache_loc[front]] = buffer[batch.out_cache_loc[nodes]].clone()
    predict[front] = predict[nodes].clone()
    logits_output.hidden_states[front] = logits_output.hidden_states[nodes].clone()
"""
PATH_MOVED = Edit(
    target=VERIFY, match="# Construct the next draft input\n", replacement=f"{MOVED}# Construct the next draft input\n"
)
STRIDE = Edit(
    target=VERIFY,
    match="bonus_tokens,\n            self.speculative_num_draft_tokens,",
    replacement="bonus_tokens,\n            accept_index.shape[1],",
)


@pytest.mark.parametrize("part", ["kv", *long("tokens", "hidden", "bonus")])
def test_a_tree_that_the_v2_worker_gets_by_hand_is_right_once_its_path_is_moved(old: Host, part: str, tmp_path: Path) -> None:
    """So what `prove --releases` sees there is the pull request's bug, and nothing that building it by hand has broken."""
    entry = LEDGER[f"26997-{part}"]
    assert entry.by_hand is not None
    fix = Patch(name="path-moved", edits=(PATH_MOVED, STRIDE))
    trace = old.engine(entry.case, (entry.by_hand, fix)).run(entry.case, tmp_path)
    assert trace.header.engine.worker == "EAGLEWorkerV2"
    assert judge(trace).status == "equal"


# Fixes on published wheels, unchanged: red on the last release before the fix, green on the first with it.


def test_fixes_are_proven_on_the_releases_around_them(tmp_path: Path) -> None:
    """Of each way to prove one: a case, a worker built by hand, a probe. Two releases, started once; the command
    `prove --releases all` needs ten."""
    known = [LEDGER["26329"], LEDGER["26997-bonus"], PROBES["26239"]]
    with warm.keeping():
        proofs = list(prove_on_wheels(known, tmp_path))
    assert len(proofs) == len(known)
    for proof in proofs:
        if "could not be fetched" in proof.why:
            pytest.skip(proof.why)
        assert proof.holds, (proof.entry.id, proof.why, proof.red, proof.green)
        assert f"on SGLang {proof.entry.last_bad} (cpu" in proof.red.report()
        assert f"on SGLang {proof.entry.fixed} (cpu" in proof.green.report()


@pytest.mark.parametrize(
    ("entry", "bad", "looked"),
    [("26329", "0.5.12.post1", "2 of 2 releases looked at, the case run 6 times"), *long(("25015", "0.5.11", ""))],
)
def test_over_releases_the_first_with_the_fix_is_named(entry: str, bad: str, looked: str, tmp_path: Path) -> None:
    fixed, rule = LEDGER[entry].fixed, LEDGER[entry].rule
    done = warm.eagletwin("bisect", entry, "--from", bad, "--to", fixed, "--json", cwd=tmp_path)
    if "could not be fetched" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done
    found = msgspec.json.decode(done.stdout, type=BisectFacts)
    assert (found.answer, found.exit_code) == (f"FIXED WITH {fixed}", 0)
    assert found.report.startswith(f"FIXED WITH {fixed}  pr-{entry}: {rule} at request a, round 0, ")
    assert f"{bad} shows it, and {fixed} no longer does: the first good release is {fixed}." in found.report
    assert looked in found.report
    assert f"\nFIXED WITH {fixed}  pr-{entry}" in done.stderr  # what people read
