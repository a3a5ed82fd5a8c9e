"""A pipeline of two stages, a process each on a CPU: what its last stage is given, drafts, verifies and keeps is judged."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.argument import argue
from eagletwin.harness.check.known import KnownBugMatcher
from eagletwin.harness.core.case import Adaptive, Case, EngineSettings, Request, Sampling, SGLangSettings, Tier
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import DEFAULT_RUN, Mode
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW, Divergence
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.families.valid import not_in_stages
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.trace_diff import diff
from eagletwin.harness.judge.trees import tree_of
from eagletwin.harness.page.run import run_page

from ..rows import long, spread
from .changes import last_of

SCHEDULER = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
WORKER = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2"
RELAY = "sglang.srt.speculative.pp_spec_relay.PPSpecRelayInput"

CHAIN = Case(
    name="chain",
    model="llama-gqa",
    num_steps=3,
    page_size=4,
    chunked_prefill_size=4,
    requests=(
        Request(id="a", prompt=(7, 19, 3, 4, 5, 6), max_new_tokens=9),
        Request(id="b", prompt=(90, 12, 55), max_new_tokens=12),
        Request(id="c", prompt=(33,), max_new_tokens=7),
        Request(id="d", prompt=(7, 19, 3, 4, 61, 2), max_new_tokens=8, arrive=7),
    ),
    exercises=("chunked_prefill", "batch", "accept_some", "rejection"),
)
SAMPLED = tuple(replace(request, sampling=Sampling(temperature=0.7)) for request in CHAIN.requests)
TREE = replace(CHAIN, name="tree", topk=3, num_draft_tokens=7, exercises=("tree", "path_not_in_front", "branch_changes_parent"))
# Each request is the last to read its own rows: nobody goes on from what they leave in the cache.
CACHED = replace(
    TREE,
    name="cached",
    page_size=1,
    requests=tuple(
        Request(id=f"r{n}", prompt=tuple((37 * at + 11) % 128 for at in range(n, 2 * n + 3)), max_new_tokens=6 + n, arrive=n)
        for n in range(6)
    ),
    exercises=("tree", "path_not_in_front"),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True)),
)


def in_settings(**settings: Any) -> Case:
    return replace(CHAIN, engine=EngineSettings(sglang=SGLangSettings(**settings)))


# What is broken, the case that shows it, and the rule that names it.
FAULTS = {
    "the root of a relayed tree is another token": (
        CHAIN,
        Edit(
            target=f"{SCHEDULER}._pp_spec_rebuild_verify_input",
            match="bonus_tokens = tree_rows[:, 0].contiguous()",
            replacement="bonus_tokens = (tree_rows[:, 0].contiguous() + 1) % 128",
        ),
        "verify.inputs",
    ),
    "trees are relayed to other requests": (
        CHAIN,
        Edit(
            target=f"{SCHEDULER}._pp_spec_rebuild_verify_input",
            match="tree_rows = relay.tokens.to(device=device, dtype=torch.int64)",
            replacement="tree_rows = relay.tokens.to(device=device, dtype=torch.int64).roll(1, 0)",
        ),
        "verify.inputs",
    ),
    "drafts are relayed to other requests, and roots are not": (
        CHAIN,
        Edit(
            target=f"{SCHEDULER}._pp_spec_rebuild_verify_input",
            match="draft_tokens = tree_rows[:, 1:].contiguous()",
            replacement="draft_tokens = tree_rows[:, 1:].roll(1, 0).contiguous()",
        ),
        "draft.proposal",
    ),
    "the first stage is told of one accepted token less": (
        CHAIN,
        Edit(
            target=f"{SCHEDULER}._pp_prepare_tensor_dict",
            match='tensor_dict["spec_accept_lens"] = result.accept_lens',
            replacement='tensor_dict["spec_accept_lens"] = (result.accept_lens - 1).clamp(min=1)',
        ),
        "draft.slots",
    ),
    "the next round is drafted behind the last one's beginning": (
        CHAIN,
        Edit(
            target=f"{WORKER}.forward_batch_generation",
            match="batch.seq_lens = batch_output.new_seq_lens",
            replacement="batch.seq_lens = batch.seq_lens",
        ),
        "verify.accept",
    ),
    "the next round is drafted from the states of other requests": (
        CHAIN,
        Edit(
            target=f"{WORKER}.forward_batch_generation",
            match="batch.spec_info = batch_output.next_draft_input",
            replacement=(
                "batch.spec_info = batch_output.next_draft_input\n"
                "batch.spec_info.hidden_states = batch.spec_info.hidden_states.roll(1, 0)"
            ),
        ),
        "draft.hidden_in",
    ),
    "a request that joins takes the place of another": (
        CHAIN,
        Edit(
            target=f"{RELAY}.adopt",
            match="rows = [by_rid.get(rid) for rid in self.rids]",
            replacement="rows = [by_rid.get(rid) for rid in reversed(self.rids)]",
        ),
        "verify.inputs",
    ),
    "shapes of trees are relayed to other requests": (
        TREE,
        Edit(
            target=f"{SCHEDULER}._pp_spec_rebuild_verify_input",
            match="top_scores_index = top_scores_index.to(device=device, dtype=torch.long)",
            replacement="top_scores_index = top_scores_index.to(device=device, dtype=torch.long).roll(1, 0)",
        ),
        "tree.mask",
    ),
    "the first stage does not move the rows of an accepted path": (
        TREE,
        Edit(
            target=f"{SCHEDULER}._pp_spec_commit_relayed_accept",
            match="if get_spec().speculative_eagle_topk > 1:",
            replacement="if False:",
        ),
        "commit.path",
    ),
    "the first stage does not move the rows of a path that ends its request": (
        CACHED,
        Edit(
            target=f"{SCHEDULER}._pp_spec_commit_relayed_accept",
            match="if get_spec().speculative_eagle_topk > 1:",
            replacement="""ends = [
    len(req.output_ids) + count >= req.sampling_params.max_new_tokens
    for req, count in zip(fwd_batch.reqs, accept_lens.tolist())
]
if not any(ends):""",
        ),
        "target.kv",
    ),
    "the first stage turns its keys as if all began one position later": (
        CACHED,
        Edit(
            target="sglang.srt.models.llama.LlamaModel.forward",
            match="hidden_states = self.embed_tokens(input_ids)",
            replacement="hidden_states, positions = self.embed_tokens(input_ids), positions + 1",
        ),
        "target.kv",
    ),
    "the second stage is given the states of other rows": (
        CHAIN,
        Edit(
            target=f"{SCHEDULER}._pp_recv_proxy_tensors",
            match="pp_proxy_tensors = PPProxyTensors(tensor_dict)",
            replacement=(
                'tensor_dict["hidden_states"] = tensor_dict["hidden_states"].roll(1, 0)\n'
                "pp_proxy_tensors = PPProxyTensors(tensor_dict)"
            ),
        ),
        "target.kv",
    ),
}


# Of these the output says nothing: what is drafted is worse, and what is committed is the same.
UNHEARD = (
    "drafts are relayed to other requests, and roots are not",
    "the next round is drafted from the states of other requests",
    "the first stage does not move the rows of a path that ends its request",
    "the first stage turns its keys as if all began one position later",
)


@pytest.fixture(scope="module")
def staged() -> Iterator[Host]:
    with Host(mode=Mode(pp=2)) as host:
        yield host


@pytest.fixture(scope="module")
def trace(staged: Host, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return staged.engine(CHAIN).run(CHAIN, tmp_path_factory.mktemp("stages"))


def test_the_last_stage_is_judged_by_its_own_layers(trace: Trace) -> None:
    verdict = judge(trace)
    assert verdict.status == "equal", verdict
    assert (trace.header.engine.pp, trace.header.engine.first_layer) == (2, 1)
    number = last_of(trace, "extend", "target_kv")
    assert trace.tensor(number, "target_kv").shape[2] == 1  # of the model's two
    whole = replace(trace.header, engine=replace(trace.header.engine, first_layer=0))
    assert judge(Trace(whole, trace.tensors)).rule == "target.kv"


def test_a_request_begins_with_a_tree_that_nobody_drafted_and_goes_on_with_drafts(trace: Trace) -> None:
    drafts = [record for record in trace.header.records if record.stage == "draft"]
    undrafted = [record for record in drafts if record.numbers.get("undrafted")]
    assert sorted((record.request, record.round) for record in undrafted) == [(name, 0) for name in "abcd"]
    assert len(drafts) > 2 * len(undrafted)
    for number, record in enumerate(trace.header.records):
        if record in undrafted:
            assert trace.integers(number, "tokens")[1:] == [0, 0, 0]


def test_the_nodes_of_a_tree_that_nobody_drafted_count_up_with_the_fix(staged: Host, tmp_path: Path) -> None:
    entry = LEDGER["pipeline-zeros"]
    assert entry.remedy is not None
    case = replace(entry.case, num_draft_tokens=6, num_steps=2)
    trace = staged.engine(case, (entry.remedy,)).run(case, tmp_path)
    assert judge(trace).status == "equal"
    number, drafted = next((n, one) for n, one in enumerate(trace.header.records) if one.numbers.get("undrafted"))
    assert (drafted.round, trace.integers(number, "tokens")[1:]) == (0, [0, 1, 2, 3, 4])
    for name, changed in (("none of both", [0, 1, 2, 3, 5]), ("in part", [0, 0, 0, 3, 4])):
        tokens = trace.tensor(number, "tokens").clone()
        tokens[1:] = torch.tensor(changed)
        verdict = judge(Trace(trace.header, trace.tensors | {f"{number}.tokens": tokens}))
        assert (verdict.status, verdict.rule) == ("diverged", "verify.inputs"), name


@pytest.mark.long
def test_a_prompt_goes_on_in_a_small_pool_where_its_chunk_would_be_empty(staged: Host, tmp_path: Path) -> None:
    """One that waited would find its slots taken: the request that decodes beside it takes what is free."""
    names = ("pipeline-empty", "pipeline-mixed")
    patches = tuple(remedy for name in names if (remedy := LEDGER[name].remedy) is not None)
    case = Case(
        name="a",
        model="llama-gqa",
        num_steps=1,
        chunked_prefill_size=1,
        requests=(
            Request(id="b", prompt=(7,), max_new_tokens=40),
            Request(id="a", prompt=tuple(range(7, 37)), max_new_tokens=1, arrive=1),
        ),
        engine=EngineSettings(sglang=SGLangSettings(mixed_chunks=True, max_total_tokens=64)),
    )
    verdict = judge(staged.engine(case, patches).run(case, tmp_path))
    assert verdict.status == "equal", verdict


def test_no_other_round_may_be_without_drafts(trace: Trace) -> None:
    """A tree that was not drafted is one of a request's first round, in a pipeline."""
    later = next(n for n, one in enumerate(trace.header.records) if one.stage == "draft" and one.round == 2)
    records = list(trace.header.records)
    records[later] = replace(records[later], numbers=records[later].numbers | {"undrafted": 1})
    verdict = judge(Trace(replace(trace.header, records=tuple(records)), trace.tensors))
    assert (verdict.status, verdict.rule) == ("diverged", "draft.proposal")
    alone = replace(trace.header, engine=replace(trace.header.engine, pp=1))
    assert judge(Trace(alone, trace.tensors)).rule == "draft.proposal"


def test_what_each_stage_records_is_demanded_of_the_earlier_ones(trace: Trace) -> None:
    (earlier,) = trace.earlier
    for stage in ("iteration", "finished", "flushed"):
        lost = next(n for n, record in enumerate(earlier.header.records) if record.stage == stage)
        records = tuple(
            replace(record, stage="flushed" if stage != "flushed" else "iteration", round=99) if n == lost else record
            for n, record in enumerate(earlier.header.records)
        )
        less = Trace(replace(earlier.header, records=records), earlier.tensors)
        verdict = judge(Trace(trace.header, trace.tensors, [less]))
        assert (verdict.status, verdict.rule) == ("diverged", "ranks.agree")
    nothing = Trace(replace(earlier.header, records=()), {})
    verdict = judge(Trace(trace.header, trace.tensors, [nothing]))
    assert verdict.first is not None
    assert (verdict.rule, verdict.first.index, verdict.first.actual) == ("ranks.agree", "the record", "absent")


@pytest.mark.long
def test_a_search_mends_there_what_is_proven_in_one_process(staged: Host) -> None:
    """The cases of most entries have a target of one layer, which no pipeline runs."""
    matcher = KnownBugMatcher(staged, replace(DEFAULT_RUN, mode=staged.mode))
    entry = LEDGER["penalties"]
    assert not_in_stages(entry.case, 2)
    assert entry in matcher.present(replace(entry.case, model="llama-gqa"), DECLARED_VIEW)
    assert matcher.ran == 0


def replace_engine(trace: Trace, **changed: Any) -> Trace:
    return Trace(replace(trace.header, engine=replace(trace.header.engine, **changed)), trace.tensors)


def with_another_token(trace: Trace) -> Trace:
    """The first stage sent the request that ended first another token than the last stage."""
    (earlier,) = trace.earlier
    at = next(n for n, record in enumerate(earlier.header.records) if record.stage == "finished")
    sent = earlier.tensor(at, "tokens").clone()
    assert sent[2] != 99
    sent[2] = 99
    return Trace(trace.header, trace.tensors, [Trace(earlier.header, earlier.tensors | {f"{at}.tokens": sent})])


def test_what_the_first_stage_sends_otherwise_is_told(trace: Trace) -> None:
    other = with_another_token(trace)
    verdict = judge(other)
    assert verdict.first is not None
    assert (verdict.rule, verdict.first.rank) == ("ranks.agree", 1)
    assert (verdict.first.index, verdict.first.actual) == ("tokens 2", "99")
    assert verdict.first.expected.endswith(", as of the last stage")
    told = argue(other.header, verdict, trace=other)
    assert "(cpu, 2 stages)" in told
    assert "rank 1" in told
    page = run_page(other, verdict, argument=told)
    assert dict(page.facts)["device"] == "cpu, float32, 2 stages"


def test_traces_are_compared_stage_by_stage(trace: Trace) -> None:
    assert diff(trace, trace).same
    (found,) = diff(trace, with_another_token(trace)).differences
    assert found.where.startswith("rank 1, ")
    with pytest.raises(InputError, match="2 stages, the other of 1 rank"):
        diff(trace, replace_engine(trace, pp=1))


def test_a_kernel_of_the_first_stage_that_was_not_checked_leaves_doubt(trace: Trace) -> None:
    (earlier,) = trace.earlier
    checked = [
        Trace(
            replace(one.header, engine=replace(one.header.engine, kernels="checked"), fallbacks=fallbacks), one.tensors, others
        )
        for one, fallbacks, others in ((earlier, ("kernel: too new",), ()), (trace, (), ()))
    ]
    verdict = judge(Trace(checked[1].header, trace.tensors, [checked[0]]))
    assert verdict.status == "unknown"
    assert "kernel: too new" in verdict.reason


@pytest.mark.parametrize(
    "case",
    [
        TREE,
        *long(
            CACHED,
            replace(CHAIN, name="sampled", requests=SAMPLED, exercises=("sampled_verify",)),
            replace(in_settings(draft_window=4, draft_sink=2), name="window"),
        ),
    ],
    ids=lambda case: case.name,
)
def test_a_case_is_equal(staged: Host, tmp_path: Path, case: Case) -> None:
    verdict = judge(staged.engine(case).run(case, tmp_path))
    assert verdict.status == "equal", verdict


@pytest.mark.long
def test_a_divergence_in_a_tree_that_nobody_drafted_is_told_without_a_drawing(staged: Host, tmp_path: Path) -> None:
    traced = staged.engine(TREE).run(TREE, tmp_path).judged_of(None)
    found = Divergence(
        rule="verify.accept", request="a", round=0, stage="verify", step=0, iteration=1, index="", expected="", actual=""
    )
    assert tree_of(traced, found) is None
    assert tree_of(traced, replace(found, round=1)) is not None


def test_a_number_that_the_first_stage_counts_otherwise_is_named(trace: Trace) -> None:
    earlier = trace.others[0]
    records = list(earlier.header.records)
    at = next(n for n, one in enumerate(records) if one.stage == "iteration" and one.iteration == 3)
    records[at] = replace(records[at], numbers=records[at].numbers | {"available": records[at].numbers["available"] + 1})
    changed = Trace(replace(earlier.header, records=tuple(records)), earlier.tensors)
    verdict = judge(Trace(trace.header, trace.tensors, [changed]))
    assert (verdict.status, verdict.rule) == ("diverged", "ranks.agree")
    assert verdict.first is not None
    assert (verdict.first.index, verdict.first.rank) == ("available", 1)


@pytest.mark.long
def test_the_same_scheduler_runs_one_case_after_another(staged: Host, tmp_path: Path) -> None:
    engine = staged.engine(CHAIN)
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        assert judge(engine.run(CHAIN, tmp_path / str(number), fresh=False)).status == "equal"


@pytest.mark.parametrize("fault", spread(sorted(FAULTS), lambda fault: FAULTS[fault][-1].partition(".")[0]))
def test_a_planted_fault_is_named(staged: Host, tmp_path: Path, fault: str) -> None:
    case, edit, rule = FAULTS[fault]
    found = staged.engine(case, (Patch(name="planted", edits=(edit,)),)).run(case, tmp_path)
    verdict = judge(found)
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict
    assert ("output.tokens" in verdict.later) <= (fault not in UNHEARD), verdict


REFUSED = {
    "a head of one layer": replace(CHAIN, model="llama-mtp", num_steps=2, page_size=1),
    "EAGLE": replace(CHAIN, model="llama-eagle3"),
    "1 layer": replace(CHAIN, model="llama-tiny"),
    "states": replace(CHAIN, model="deepseek-nextn"),
    "hierarchical cache": in_settings(radix_cache=True, host_pages=16),
    "rejection sampling": replace(in_settings(rejection_sampling=True), requests=SAMPLED),
    "adaptive steps": replace(in_settings(adaptive=Adaptive(tiers=(Tier(batch=1, steps=(1, 3)),))), page_size=1),
}


@pytest.mark.parametrize("why", sorted(REFUSED))
def test_what_a_pipeline_does_not_run_is_refused_by_name(staged: Host, why: str) -> None:
    with pytest.raises(WouldNotStart, match=rf"a pipeline of \S+: .*{why}"):
        staged.engine(replace(REFUSED[why], exercises=()))
