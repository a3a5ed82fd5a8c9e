"""A plain language model as draft (STANDALONE): the released worker is wrong, its fix is right, faults in it are seen."""

import msgspec
import pytest

from eagletwin.cases.ledger.standalone import AS_TRAINED, KEYS
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.rules import catalogue

from ..rows import long, spread
from .changes import IDLE_IN_CHAINS, Change, bump, changed, last_of, nudge, of_keys, of_values, shorten
from .conftest import Runner

WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"


@pytest.fixture(scope="module")
def chain(busy_case: Case) -> Case:
    return msgspec.structs.replace(busy_case, model="llama-standalone")


@pytest.fixture(scope="module")
def tree(chain: Case) -> Case:
    return msgspec.structs.replace(chain, topk=2, num_draft_tokens=6)


@pytest.fixture(scope="module")
def mended(host: Host, chain: Case, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The chain with the candidate fix."""
    return host.engine(chain, (AS_TRAINED,)).run(chain, tmp_path_factory.mktemp("mended"))


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_the_released_worker_runs_the_draft_on_a_text_without_its_first_token(
    run: Runner, request: pytest.FixtureRequest, shape: str
) -> None:
    case: Case = request.getfixturevalue(shape)
    trace, verdict = run(case, *KEYS.edits)
    assert (verdict.status, verdict.rule) == ("diverged", "draft.input_ids")
    assert verdict.first is not None
    prompt = case.requests[0].prompt
    assert (verdict.first.index, verdict.first.expected, verdict.first.actual) == (
        "row 0, and 7 more",
        str(prompt[0]),
        str(prompt[1]),
    )
    shifted = judge(trace, view="shifted")
    assert (shifted.status, shifted.view) == ("equal", "shifted"), shifted


def test_without_keys_in_pairs_a_shifted_row_is_handed_on_to_another_token(run: Runner, chain: Case) -> None:
    trace, _ = run(msgspec.structs.replace(chain, page_size=1))  # in whole pages the prompts must part at a page's edge
    shifted = judge(trace, view="shifted")
    assert (shifted.status, shifted.rule) == ("diverged", "draft.kv")
    assert shifted.first is not None
    assert shifted.first.request == "b"


def test_a_chain_is_equal_with_the_candidate_fix_and_no_rule_was_idle_but_those_of_states(mended: Trace) -> None:
    verdict = judge(mended)
    assert verdict.status == "equal", verdict
    assert verdict.ties == 0
    idle = IDLE_IN_CHAINS
    idle += ("verify.coins", "verify.probabilities", "draft.probabilities", "draft.hidden_in", "target.hidden")
    idle += (
        "target.state",
        "target.conv",
        "state.",
        "output.logprobs",
        "output.hidden",
        "output.grammar",
        "grammar.",
        "target.compressor",
        "steps.",
        "session.",
        "output.plain",
    )
    assert set(verdict.checked) == {rule for rule in catalogue() if not rule.startswith(idle)}
    for feature in ("chunked_prefill", "batch", "batch_grows", "batch_shrinks", "radix_hit", "page_crossed_in_draft"):
        assert feature in verdict.exercised
    steps = {record.step for record in mended.header.records if record.stage == "draft.decode"}
    assert steps == {0, 1, 2}


def test_a_tree_is_equal_with_the_candidate_fix(run: Runner, tree: Case) -> None:
    _, verdict = run(tree, *AS_TRAINED.edits)
    assert verdict.status == "equal", verdict
    assert {"tree", "path_not_in_front", "branch_holes", "radix_hit"} <= set(verdict.exercised)


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, *long(2)])
@pytest.mark.parametrize("topk", [1, *long(4)])
def test_short_drafts_are_equal_with_the_candidate_fix(run: Runner, chain: Case, num_steps: int, topk: int) -> None:
    nodes = 5 if topk > 1 else 0
    _, verdict = run(msgspec.structs.replace(chain, num_steps=num_steps, topk=topk, num_draft_tokens=nodes), *AS_TRAINED.edits)
    assert verdict.status == "equal", verdict


def _after_prefill(line: str) -> Edit:
    """Once the draft has stored a prefill's rows."""
    forward = "logits_output = self.draft_runner.forward(forward_batch).logits_output"
    rows = "pool, slots = self.draft_runner.token_to_kv_pool, forward_batch.out_cache_loc"
    return Edit(target=f"{WORKER}._draft_extend_for_prefill", match=forward, replacement=f"{forward}\n{rows}\n{line}")


# (which case, edit, rule that must name it first)
PLANTED = {
    "one row off in prefill": (
        "chain",
        Edit(
            target=f"{WORKER}._draft_extend_for_prefill",
            match="input_ids = batch.input_ids[pt : pt + extend_len]",
            replacement="input_ids = batch.input_ids[pt : pt + extend_len].roll(1)",
        ),
        "draft.input_ids",
    ),
    "one row off after verify": (
        "chain",
        Edit(
            target=f"{WORKER}._draft_extend_for_decode",
            match="torch.cat([bonus, next_token_ids.view(-1, width)[:, :-1]], dim=1).flatten()",
            replacement="next_token_ids",
        ),
        "draft.input_ids",
    ),
    "a wrong token: draft decode begins with another request's bonus": (
        "tree",
        Edit(
            target=f"{WORKER}.draft_forward",
            match="spec_info.bonus_tokens.repeat_interleave(self.topk)",
            replacement="spec_info.bonus_tokens.flip(0).repeat_interleave(self.topk)",
        ),
        "draft.input_ids",
    ),
    "a wrong position: the bonus token stands one further": (
        "chain",
        Edit(
            target=f"{WORKER}.draft_forward",
            match="forward_batch.input_ids = spec_info.bonus_tokens",
            replacement="forward_batch.positions.add_(1)\nforward_batch.input_ids = spec_info.bonus_tokens",
        ),
        "draft.positions",
    ),
    "the bonus token's row lies in the slot of the next step": (
        "chain",
        Edit(target=f"{WORKER}.draft_forward", match="= out_cache_loc[0]", replacement="= out_cache_loc[1]"),
        "draft.slots",
    ),
    "the least likely of the root's children": (
        "tree",
        Edit(target=f"{WORKER}.draft_forward", match="renorm_draft_probs(root,", replacement="renorm_draft_probs(-root,"),
        "draft.proposal",
    ),
    "a stale row: a prefill's last is left as the first": (
        "chain",
        _after_prefill("pool.k_buffer[0][slots[-1]] = pool.k_buffer[0][slots[0]]"),
        "draft.kv",
    ),
    "half of a row's value is stored": (
        "chain",
        _after_prefill("pool.v_buffer[0][slots] *= torch.arange(pool.v_buffer[0].shape[-1]) % 2"),
        "draft.kv",
    ),
    "the halves of a row's key are exchanged": (
        "chain",
        _after_prefill("pool.k_buffer[0][slots] = pool.k_buffer[0][slots].roll(pool.k_buffer[0].shape[-1] // 2, -1)"),
        "draft.kv",
    ),
    "a stale row: the bonus token's is written over while draft decode runs": (
        "chain",
        Edit(
            target=f"{WORKER}.draft_forward",
            match="topk1_chain_fits = (",
            replacement=("self.draft_runner.token_to_kv_pool.v_buffer[0][out_cache_loc[0]] = 0\ntopk1_chain_fits = ("),
        ),
        "draft.scratch_kv",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", spread(PLANTED, lambda fault: PLANTED[fault][-1].partition(".")[0]))
def test_a_fault_in_the_mended_worker_is_found_and_named(run: Runner, request: pytest.FixtureRequest, fault: str) -> None:
    shape, edit, rule = PLANTED[fault]
    case: Case = request.getfixturevalue(shape)
    trace, verdict = run(case, *AS_TRAINED.edits, edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


@pytest.mark.parametrize(
    ("stage", "tensor", "change", "rule"),
    [
        ("draft.extend", "input_ids", bump, "draft.input_ids"),
        ("draft.extend", "positions", bump, "draft.positions"),
        ("draft.decode", "input_ids", bump, "draft.input_ids"),
        ("draft.decode", "positions", bump, "draft.positions"),
        ("draft.decode", "slots", bump, "draft.slots"),
        ("draft.extend_decode", "input_ids", bump, "draft.input_ids"),
        ("draft.extend_decode", "positions", bump, "draft.positions"),
        ("draft", "tokens", bump, "draft.proposal"),
        ("draft", "scratch_kv", of_keys(nudge), "draft.scratch_kv"),
        ("prefill", "draft_kv", of_values(nudge), "draft.kv"),
        ("extend", "draft_kv", of_keys(nudge), "draft.kv"),
        ("extend", "target_kv", of_keys(nudge), "target.kv"),
        ("cached", "draft_kv", of_values(nudge), "draft.kv"),
        ("cached", "target_kv", of_values(nudge), "target.kv"),
    ],
)
def test_one_changed_tensor_is_found_and_named(mended: Trace, stage: str, tensor: str, change: Change, rule: str) -> None:
    number = last_of(mended, stage, tensor)
    verdict = judge(changed(mended, {f"{number}.{tensor}": change(mended.tensor(number, tensor))}))
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


def test_the_row_of_the_bonus_token_is_looked_at(mended: Trace) -> None:
    """It is the first of what draft decode wrote, and a trace that lacks it is not complete."""
    number = last_of(mended, "draft", "scratch_kv")
    rows = mended.tensor(number, "scratch_kv")
    wrong = rows.clone()
    wrong[0] = rows[1]
    verdict = judge(changed(mended, {f"{number}.scratch_kv": wrong}))
    assert (verdict.status, verdict.rule) == ("diverged", "draft.scratch_kv")
    assert verdict.first is not None
    assert verdict.first.step == 0
    assert judge(changed(mended, {f"{number}.scratch_kv": shorten(rows)})).status == "unknown"


def test_a_prompt_that_the_cache_holds_whole_is_no_lock_without_an_owner(run: Runner, chain: Case) -> None:
    """Keys of single tokens: all slots of a request that was just prefilled are the cache's, and it lives."""
    settings = msgspec.structs.replace(chain.engine.sglang, max_total_tokens=128)
    case = msgspec.structs.replace(
        chain,
        page_size=1,
        requests=(msgspec.structs.replace(chain.requests[0], prompt=(7, 19, 3), max_new_tokens=4),),
        engine=msgspec.structs.replace(chain.engine, sglang=settings),
    )
    _, verdict = run(case, *AS_TRAINED.edits)
    assert verdict.status == "equal", verdict
