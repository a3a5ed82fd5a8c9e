"""Rows that attend to chosen rows (DSA): SGLang's own worker is equal but for a live bug, and a fault in each part is named."""

from pathlib import Path

import pytest
import torch

from eagletwin.cases.ledger import LEDGER, remedies_of
from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.sglang.taps.inner import CapturedChoices
from eagletwin.harness.families.dimensions.dimension import tokens
from eagletwin.harness.families.valid import not_driven
from eagletwin.harness.judge.judge import compare_trace, judge

from ..rows import long, spread
from .changes import changed, last_of
from .conftest import Runner, in_mode

INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer"
BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
CHOICE = "sglang.srt.layers.attention.dsa.dsa_topk_backend._topk_unfused"

BUG = ["dsa-draft-reads-worker"]
REMEDY = remedies_of(BUG)[0].edits
LONG = tokens(3, 70, 96)


@pytest.fixture(scope="module")
def chain() -> Case:
    """Chunks, a batch, a prefix hit of a page, rounds of every kind; all but the first rows choose."""
    return Case(
        name="chosen-rows",
        model="deepseek-dsa",
        num_steps=3,
        page_size=64,
        chunked_prefill_size=512,
        chunks=(64,),
        requests=(
            Request(id="a", prompt=LONG, max_new_tokens=8),
            Request(id="b", prompt=tokens(5, 19, 96), max_new_tokens=8),
            Request(id="c", prompt=(*LONG[:66], 9, 4), max_new_tokens=4, arrive=12),
        ),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=1024)),
        exercises=("chunked_prefill", "batch", "radix_hit", "rejection", "accept_some"),
    )


_OF_KEY = (f"{INDEXER}._store_index_k_cache", "k_fp8, k_scale = act_quant(key, self.block_size, self.scale_fmt)")
_PAGED = f"{INDEXER}._get_topk_paged"
_CHOSEN = "topk_result = metadata.topk_transform(logits, self.index_topk)"


def _in(mode: str, change: str) -> tuple[str, str, str]:
    """A choice that the indexer hands on changed, in the forwards of a mode."""
    return _PAGED, _CHOSEN, f"{_CHOSEN}\nif forward_batch.forward_mode.is_{mode}():\n    topk_result = topk_result.{change}"


# What is wrong, where, and the rule that names it.
FAULTS = {
    "a row does not choose itself": (
        CHOICE,
        "lengths = lengths.to(dtype=torch.int32, device=score.device)",
        "lengths = lengths.to(dtype=torch.int32, device=score.device) - 1",
        "target.selection",
    ),
    "the rows with the lowest scores are chosen": (
        CHOICE,
        "masked_logits = score.masked_fill(",
        "masked_logits = (-score).masked_fill(",
        "target.selection",
    ),
    "keys of another position are scored": (
        f"{INDEXER}._get_topk_ragged",
        "kv_fp8 = (k_fp8, k_scale)",
        "kv_fp8 = (k_fp8.view(torch.uint8).roll(1, 0).view(k_fp8.dtype), k_scale.roll(1, 0))",
        "target.selection",
    ),
    "queries are not turned by Hadamard's matrix": (
        f"{INDEXER}._get_q_k_bf16",
        "else:\n        query = self._maybe_rotate(query)\n        key = self._maybe_rotate(key)",
        "else:\n        key = self._maybe_rotate(key)",
        "target.selection",
    ),
    "verify takes the choice of another node": (*_in("target_verify", "roll(1, 0)"), "target.selection"),
    "draft extend takes the choice of another row": (*_in("draft_extend_v2", "roll(1, 0)"), "draft.selection"),
    "draft decode takes the choice of another request": (*_in("decode", "flip(0)"), "draft.selection"),
    "draft decode scores the keys of another request": (
        _PAGED,
        "block_tables = metadata.get_page_table_64()",
        "block_tables = metadata.get_page_table_64()\n"
        "if forward_batch.forward_mode.is_decode():\n    block_tables = block_tables.flip(0)",
        "draft.selection",
    ),
    "a key is stored for the row before its own": (*_OF_KEY, _OF_KEY[1].replace("(key,", "(key.roll(-1, 0),"), "target.kv"),
    "draft extend stores the keys of another row": (
        *_OF_KEY,
        _OF_KEY[1].replace("(key,", "(key.roll(int(forward_batch.forward_mode.is_draft_extend_v2()), 0),"),
        "draft.kv",
    ),
    "draft decode stores the keys of another request": (
        *_OF_KEY,
        _OF_KEY[1].replace("(key,", "(key.flip(0) if forward_batch.forward_mode.is_decode() else key,"),
        "draft.scratch_kv",
    ),
    "a choice is one short": (CHOICE, "valid_topk = min(topk,", "valid_topk = min(topk - 1,", "target.selection"),
    "a head has the weight of another": (
        f"{INDEXER}._weights_proj_bf16_in_fp32_out",
        "return weights.float()",
        "return weights.float().roll(1, -1)",
        "target.selection",
    ),
    "keys turn in attention's own pairs": (
        f"{INDEXER}.__init__",
        "is_neox_style=is_neox_style,\n        device",
        "is_neox_style=False,\n        device",
        "target.kv",
    ),
    "draft decode attends to the choice of another request": (
        f"{BACKEND}.forward_decode",
        "page_table=metadata.page_table_1,\n            topk_indices=topk_indices,",
        "page_table=metadata.page_table_1,\n            topk_indices=topk_indices.flip(0).contiguous(),",
        "draft.proposal",
    ),
    "verify attends to the rows of another node": (
        f"{BACKEND}.forward_extend",
        "topk_indices=topk_indices,\n                extend_lens_cpu",
        "topk_indices=topk_indices.roll(int(forward_batch.forward_mode.is_target_verify()), 0),\n"
        "                extend_lens_cpu",
        "target.kv",
    ),
}


def test_a_chain_is_equal_with_the_candidate_fix_of_a_live_bug(run: Runner, chain: Case) -> None:
    trace, verdict = run(chain, *REMEDY)
    assert verdict.status == "equal", (verdict, trace.header.ending)


@pytest.fixture(scope="module")
def mended(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Without ties: the reference follows no choice of the trace."""
    case = LEDGER[BUG[0]].case
    return host.engine(case, remedies_of(BUG)).run(case, tmp_path_factory.mktemp("mended"))


@pytest.mark.parametrize(
    ("stage", "rule"),
    [
        ("target.extend", "target.selection"),
        ("target.verify", "target.selection"),
        ("draft.extend", "draft.selection"),
        ("draft.extend_decode", "draft.selection"),
        ("draft.decode", "draft.selection"),
    ],
)
def test_a_row_that_was_chosen_is_compared_where_no_number_shows_it(mended: Trace, stage: str, rule: str) -> None:
    number = last_of(mended, stage, "chosen")
    chosen = mended.tensor(number, "chosen").clone()
    left_out = next(row for row in range(len(LONG)) if row not in chosen[0, -1])
    chosen[0, -1, 0] = left_out
    wrong = changed(mended, {f"{number}.chosen": chosen})
    verdict, record = judge(wrong), mended.header.records[number]
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict
    assert verdict.first is not None
    assert (verdict.first.request, verdict.first.round) == (record.request, record.round)
    assert f"layer {chosen.shape[1] - 1}" in verdict.first.index
    assert judge(wrong, frozenset({rule})).status == "equal"
    assert judge(changed(mended, {f"{number}.chosen": mended.tensor(number, "chosen")[:-1]})).status == "unknown"
    tensors = {name: tensor for name, tensor in mended.tensors.items() if name != f"{number}.chosen"}
    assert judge(Trace(mended.header, tensors)).status == "unknown"


# Of a retracted request each row is computed twice. Rows of no score tie, and the later ones win in the first prefill alone.
TWICE = Case(
    name="chosen-twice",
    model="deepseek-dsa",
    num_steps=3,
    page_size=64,
    chunked_prefill_size=512,
    requests=(Request(id="a", prompt=tokens(4, 57, 96), max_new_tokens=4, arrive=1),),
    events=(Event(at=3, kind="retract"),),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=1024)),
    exercises=("retraction_in_decode",),
)
TIES = Edit(
    target=CHOICE,
    match="masked_logits = score.masked_fill(",
    replacement="_topk_unfused.calls = getattr(_topk_unfused, 'calls', 0) + 1\n"
    "order = torch.arange(score.shape[-1], device=score.device) * (1e-7 if _topk_unfused.calls <= 2 else -1e-7)\n"
    "masked_logits = (score + order).masked_fill(",
)


def test_ties_of_a_row_that_is_computed_twice_are_each_followed_in_their_life(run: Runner) -> None:
    trace, verdict = run(TWICE, *REMEDY, TIES)
    assert verdict.status == "equal", (verdict, trace.header.ending)
    findings, [replays] = compare_trace(trace, frozenset(), DECLARED_VIEW, "as the trace")
    [began] = replays["a"].lives
    assert replays["a"].rerouted
    assert {divergence.iteration < began for divergence in findings.in_order()} == {True}
    # what no tie admits is followed in neither
    first = next(number for number, record in enumerate(trace.header.records) if record.stage == "target.extend")
    for number in (first, last_of(trace, "target.extend", "chosen")):
        chosen = trace.tensor(number, "chosen").clone()
        chosen[40, 0, 0] = next(row for row in range(40) if row not in chosen[40, 0])
        assert judge(changed(trace, {f"{number}.chosen": chosen})).status in ("diverged", "unknown"), number


def test_a_step_does_not_choose_its_own_rows(run: Runner, chain: Case) -> None:
    """Live: docs/findings/dsa-draft-reads. A step scores the committed rows alone."""
    _, verdict = run(chain)
    assert (verdict.status, verdict.rule) == ("diverged", "draft.selection"), verdict


@pytest.mark.parametrize("fault", spread(sorted(FAULTS), lambda fault: FAULTS[fault][-1]))
def test_a_fault_is_named(run: Runner, chain: Case, fault: str) -> None:
    target, match, replacement, rule = FAULTS[fault]
    trace, verdict = run(chain, *REMEDY, Edit(target=target, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


# 128 rows are chosen in bfloat16, which moves scores: a choice within that bound is followed, and no other. There a prefill of
# at most 128 rows is dense: its indexer stores keys, and chooses nothing.

PROMPT = tokens(3, 150, 96)
WIDE = Case(
    name="chosen-wide",
    model="deepseek-dsa-wide",
    num_steps=3,
    page_size=64,
    chunked_prefill_size=128,
    requests=(
        Request(id="a", prompt=PROMPT, max_new_tokens=4),
        Request(id="b", prompt=tokens(5, 60, 96), max_new_tokens=4),
        Request(id="c", prompt=(*PROMPT[:66], 9, 4), max_new_tokens=3, arrive=9),
    ),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=1024)),
    exercises=("chunked_prefill", "batch", "radix_hit"),
)
DENSE_FAULTS = {
    "a row of a dense prefill sees those after it": (
        f"{BACKEND}._forward_standard_mha",
        "causal = True",
        "causal = False",
        "target.kv",
    ),
    "a prefill of more rows than are chosen is dense": (
        f"{BACKEND}.set_dsa_prefill_impl",
        "<= envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD.get()",
        "<= 2048",
        "target.hidden",
    ),
}


@pytest.fixture(scope="module")
def in_bfloat16(host: Host) -> object:
    with in_mode(host, Mode(dtype="bfloat16")) as other:
        yield other


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "",
        *DENSE_FAULTS,
        *long(
            "the rows with the lowest scores are chosen",
            "keys of another position are scored",
            "queries are not turned by Hadamard's matrix",
            "verify takes the choice of another node",
        ),
    ],
)
def test_choices_of_bfloat16_are_judged(in_bfloat16: Host, tmp_path: Path, fault: str) -> None:
    target, match, replacement, rule = (FAULTS | DENSE_FAULTS)[fault] if fault else ("", "", "", "")
    edits = (*REMEDY, Edit(target=target, match=match, replacement=replacement)) if fault else REMEDY
    trace = in_bfloat16.engine(WIDE, (Patch(name="planted", edits=edits),)).run(WIDE, tmp_path)
    verdict = judge(trace)
    assert (verdict.status, verdict.rule) == ("diverged" if fault else "equal", rule), (verdict, trace.header.ending)
    if not fault:  # dense, and chosen
        shown = {"chosen" in record.tensors for record in trace.header.records if record.stage == "target.extend"}
        assert shown == {False, True}


# A draft that runs in a graph has a plan of its own, made before a replay.

IN_GRAPHS = remedies_of(["dsa-draft-reads-graphs"])[0].edits


@pytest.fixture(scope="module")
def in_graphs(host: Host) -> object:
    with in_mode(host, Mode(graphs=(1, 2, 4))) as other:
        yield other


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("", ""),
        ("draft decode takes the choice of another request", "draft.selection"),
        *long(
            ("verify takes the choice of another node", "target.selection"),
            ("draft decode stores the keys of another request", "draft.scratch_kv"),
        ),
    ],
)
def test_choices_in_graphs_are_judged(in_graphs: Host, tmp_path: Path, chain: Case, fault: str, rule: str) -> None:
    target, match, replacement, _ = FAULTS[fault] if fault else ("", "", "", "")
    edits = (*IN_GRAPHS, Edit(target=target, match=match, replacement=replacement)) if fault else IN_GRAPHS
    trace = in_graphs.engine(chain, (Patch(name="planted", edits=edits),)).run(chain, tmp_path)
    verdict = judge(trace)
    assert (verdict.status, verdict.rule) == ("diverged" if fault else "equal", rule), (verdict, trace.header.ending)


def test_what_a_graph_holds_of_choices_is_read_after_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the graph that was replayed alone, as it wrote them anew."""

    class Graph:
        def __init__(self) -> None:
            self.writes: list[torch.Tensor] = []

        def capture_begin(self) -> None:
            pass

        def replay(self) -> None:
            for kept in self.eagletwin_chosen:  # type: ignore[attr-defined]
                kept += 10

    choices = CapturedChoices()
    choices.watch(Graph)
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    choices.note(torch.tensor([[7]]))  # a warm-up
    capturing, graphs = True, (Graph(), Graph())
    for number, graph in enumerate(graphs):
        graph.capture_begin()
        choices.note(row := torch.tensor([[number]]))
        row += 100  # it is a copy that is kept
        choices.note(torch.tensor([[number + 5]]))
        choices.note(None)
    assert choices.take() == []
    graphs[1].replay()
    assert [rows.tolist() for rows in choices.take()] == [[[11]], [[16]]]
    assert choices.take() == []


def test_what_a_gpu_does_not_run_is_named(chain: Case) -> None:
    for case, dtype, why in (
        (chain, "bfloat16", "deepseek-dsa on a GPU: FlashMLA's prefill takes a multiple of 128 chosen rows"),
        (WIDE, "float32", "deepseek-dsa-wide on a GPU: FlashMLA's kernels know bfloat16 alone there"),
        (WIDE, "bfloat16", ""),
    ):
        assert not_driven(case, Mode(device="cuda", graphs=(1, 2), overlap=True, dtype=dtype)).startswith(why), dtype
        assert bool(why) == bool(not_driven(case, Mode(device="cuda", dtype=dtype)))
