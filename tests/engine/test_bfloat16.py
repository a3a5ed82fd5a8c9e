"""The worker in bfloat16, as users run it, on a CPU: equal as released, diverged with a fault, and near to float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.known import KnownBugMatcher
from eagletwin.harness.core.case import Case, Event, Request, Sampling
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import DEFAULT_RUN, Mode, RunSpec
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families.valid import read_trace
from eagletwin.harness.judge.judge import judge

from ..lab.gpu.compared import Apart, apart, apart_text
from ..rows import spread
from .conftest import in_mode

UNIT = 2.0**-8


@pytest.fixture(scope="module")
def brains(host: Host) -> Iterator[Host]:
    with in_mode(host, Mode(dtype="bfloat16")) as other:
        yield other


def test_a_busy_case_is_equal_and_near_to_float32(
    brains: Host, busy_case: Case, busy_tree: Case, busy_trace: Trace, tree_trace: Trace, tmp_path: Path
) -> None:
    for case, other in ((busy_case, busy_trace), (busy_tree, tree_trace)):
        folder = tmp_path / case.name
        folder.mkdir()
        brains.engine(case).run(case, folder)
        trace = read_trace(folder)  # as it is written
        verdict = judge(trace)
        assert verdict.status == "equal", verdict.reason or verdict.first
        assert 0.02 < verdict.headroom < 0.6
        assert trace.header.engine.dtype == "bfloat16"
        assert trace.header.engine.mode == "bfloat16"
        assert trace.header.fallbacks == ()
        found = apart(trace, other)
        assert {"target.hidden", "target.kv", "draft.kv", "draft.hidden"} <= found.rows.keys()
        assert all(rows.quantile(0.5) < 4 * UNIT and UNIT / 8 < rows.largest < 16 * UNIT for rows in found.rows.values())
        assert found.decided[0] > 2
        assert found.requests[0] == 2
        assert found.tokens[1] <= found.tokens[0]
        assert "accept length" in apart_text([found, Apart()])
        same = apart(other, other)
        assert max(rows.largest for rows in same.rows.values()) == 0 == same.proposed[1] == same.decided[1] == same.requests[1]


@pytest.mark.long
def test_a_retracted_request_s_chunk_tail_is_known_where_rounding_alone_makes_the_target_choose_another_token(
    brains: Host, host: Host
) -> None:
    """A greedy request that asks for nothing. In float32 it is given the token that it had emitted."""
    case = Case(
        name="comes-back",
        model="llama-tiny",
        num_steps=1,
        chunks=(64, 2),
        requests=(Request(id="a", prompt=(74,), max_new_tokens=5),),
        events=(Event(at=2, kind="retract"),),
    )
    matcher = KnownBugMatcher(brains, RunSpec(mode=brains.mode))
    trial = matcher.trials().look(case)
    assert (trial.verdict.status, trial.verdict.rule) == ("diverged", "draft.input_ids")
    one = matcher.explain(trial, DECLARED_VIEW)
    assert [entry.id for entry in one.known] == ["retracted-chunk-tail"]
    assert one.trial.clean
    assert KnownBugMatcher(host, DEFAULT_RUN).trials().look(case).clean


@pytest.mark.parametrize("name", spread(["25015", "26329", "26997-kv"]))
def test_bugs_of_the_ledger_are_found(brains: Host, name: str, tmp_path: Path) -> None:
    entry = LEDGER[name]
    for word, side, status in (("green", entry.green, "equal"), ("red", entry.red, "diverged")):
        (tmp_path / word).mkdir()
        verdict = judge(brains.engine(entry.case, side.patches).run(entry.case, tmp_path / word), view=side.view)
        assert (verdict.status, verdict.rule) == (status, entry.rule if word == "red" else "")


@pytest.mark.long
def test_experts_are_followed_where_they_tie_and_swapped_ones_are_a_divergence(brains: Host, tmp_path: Path) -> None:
    prompt = tuple(range(3, 93)) + tuple(range(70, 2, -2))  # some 30 of its choices are near a tie
    case = Case(
        name="experts",
        model="deepseek-nextn",
        num_steps=3,
        chunked_prefill_size=64,
        requests=(Request(id="a", prompt=prompt, max_new_tokens=16),),
    )
    swapped = Edit(
        target="sglang.srt.layers.moe.topk.biased_grouped_topk_impl",
        match="topk_weights, topk_ids = topk_weights.to(torch.float32), topk_ids.to(torch.int32)",
        replacement="topk_weights, topk_ids = topk_weights.to(torch.float32), topk_ids.flip(-1).to(torch.int32)",
    )
    for name, edits, expected in (("right", (), ("equal", "")), ("swapped", (swapped,), ("diverged", "target.hidden"))):
        (tmp_path / name).mkdir()
        patches = (Patch(name="planted", edits=edits),) if edits else ()
        trace = brains.engine(case, patches).run(case, tmp_path / name)
        verdict = judge(trace)
        assert (verdict.status, verdict.rule) == expected, verdict
        chosen = [trace.array(n, "experts") for n, record in enumerate(trace.header.records) if "experts" in record.tensors]
        assert {(rows.shape[1:], int(rows.max()) < 8) for rows in chosen} == {((1, 2), True)}  # of one layer in each model


@pytest.mark.long
def test_experts_with_biases_and_sinks_are_equal(brains: Host, tmp_path: Path) -> None:
    """SGLang's gpt-oss computes in the type that its checkpoint names: asked for another one, it ends in its first product."""
    case = Case(
        name="gpt-oss",
        model="gpt-oss-eagle3",
        num_steps=3,
        chunked_prefill_size=8,
        requests=(Request(id="a", prompt=(5, 17, 33, 8, 60, 41, 2, 19, 77, 50, 3, 9), max_new_tokens=12),),
    )
    swapped = Edit(
        target="sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        match="topk_weights, topk_ids, _ = topk_output",
        replacement="topk_weights, topk_ids, _ = topk_output\ntopk_ids = topk_ids.flip(1)",
    )
    for name, edits, expected in (("right", (), ("equal", "")), ("swapped", (swapped,), ("diverged", "target.kv"))):
        (tmp_path / name).mkdir()
        patches = (Patch(name="planted", edits=edits),) if edits else ()
        verdict = judge(brains.engine(case, patches).run(case, tmp_path / name))
        assert (verdict.status, verdict.rule) == expected, verdict


@pytest.mark.parametrize("kernels", ["interpreter", "shadow"])
def test_the_interpreter_is_refused(brains: Host, kernels: str, busy_case: Case) -> None:
    with pytest.raises(InputError, match="bfloat16"):
        brains.engine(busy_case, (), kernels)  # type: ignore[arg-type]


def test_a_request_that_samples_is_judged_where_it_is_cut(brains: Host, tmp_path: Path) -> None:
    """Within the bound of bfloat16 the reference cannot tell which of many tokens a top_p keeps; the engine's own logits do."""
    prompt = tuple(range(30, 50))
    more = Edit(
        target="sglang.srt.speculative.eagle_utils.eagle_sample",
        match="sampling_info.top_ps, verify_input",
        replacement="sampling_info.top_ps + 0.2, verify_input",
    )
    cut = Sampling(temperature=1.5, top_p=0.5)
    for name, sampling, edits, expected in (
        ("whole", Sampling(), (), ("equal", "")),
        ("cut", cut, (), ("equal", "")),
        ("more", cut, (more,), ("diverged", "verify.probabilities")),
    ):
        request = Request(id="a", prompt=prompt, max_new_tokens=12, sampling=sampling)
        case = Case(name=name, model="llama-tiny", num_steps=2, requests=(request,))
        (tmp_path / name).mkdir()
        patches = (Patch(name="planted", edits=edits),) if edits else ()
        trace = brains.engine(case, patches).run(case, tmp_path / name)
        verdict = judge(trace)
        assert (verdict.status, verdict.rule) == expected, verdict
        assert "verify.probabilities" not in verdict.unseen
