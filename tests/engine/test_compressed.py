"""DeepSeek-V4 in its own worker on a CPU: equal but for a live bug, and a fault in each part of what is stored is named."""

from dataclasses import dataclass

import pytest

from eagletwin.cases.ledger import remedies_of
from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families.dimensions.dimension import tokens
from eagletwin.harness.judge.judge import judge

from ..rows import long
from .changes import changed
from .conftest import in_mode

REMEDY = remedies_of(["dsv4-draft-reads-worker"])[0].edits
COMPRESSOR = "sglang.srt.layers.attention.dsv4.compressor_v2.CompressorBackendMixin"
POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
MODEL = "sglang.srt.models.deepseek_v4"
NEXTN = "sglang.srt.models.deepseek_v4_nextn.DeepseekV4ModelNextN"
WORKER = "sglang.srt.speculative.eagle_worker_common"


@pytest.fixture(scope="module")
def chain() -> Case:
    """A batch in which groups of 4 and of 128 rows end in rounds, some of whose drafts are rejected."""
    return Case(
        name="compressed-rows",
        model="deepseek-v4",
        num_steps=3,
        page_size=256,
        chunked_prefill_size=256,
        requests=(
            Request(id="a", prompt=tokens(3, 125, 96), max_new_tokens=8),
            Request(id="b", prompt=tokens(5, 6, 96), max_new_tokens=8),
        ),
        engine=EngineSettings(sglang=SGLangSettings(max_total_tokens=4096)),
        exercises=("batch", "rejection", "accept_some", "draft_decode"),
    )


@dataclass(frozen=True)
class Fault:
    target: str
    match: str
    replacement: str
    rule: str


def _at(line: str, more: str) -> tuple[str, str]:
    """The statement, and one behind it."""
    return line, f"{line}\n{more}"


_SCORE = "kv_score_input = compressor.compute_kv_score(x, forward_batch)"
_SLOT = "out_loc = self._get_out_loc(compressor.ratio)"
_STORE = f"{MODEL}.MQALayer._compute_kv_to_cache"
_UNIFIED = f"{COMPRESSOR}.forward_unified"

FAULTS = {
    "a compressed row of ratio 128 goes to the slot of another": Fault(
        _UNIFIED, *_at(_SLOT, "if compressor.ratio == 128:\n    out_loc = out_loc + 1"), "target.kv"
    ),
    "a compressed row of ratio 4 goes to the slot of another row of its batch": Fault(
        _UNIFIED,
        *_at(_SLOT, "if compressor.ratio == 4 and not compressor.is_in_indexer:\n    out_loc = out_loc.roll(4, 0)"),
        "target.kv",
    ),
    "index keys go to the slot of another position": Fault(
        _UNIFIED, *_at(_SLOT, "if compressor.is_in_indexer:\n    out_loc = out_loc.roll(4, 0)"), "target.kv"
    ),
    "the compressor of verify keeps the row of another node": Fault(
        _UNIFIED,
        *_at(
            _SCORE,
            "if forward_batch.forward_mode.is_target_verify() and compressor.ratio == 128:\n"
            "    kv_score_input = kv_score_input.roll(1, 0)",
        ),
        "target.compressor",
    ),
    "the compressor of index keys keeps the row of another node": Fault(
        _UNIFIED,
        *_at(
            _SCORE,
            "if forward_batch.forward_mode.is_target_verify() and compressor.is_in_indexer:\n"
            "    kv_score_input = kv_score_input.roll(1, 0)",
        ),
        "target.compressor",
    ),
    "an accepted row is cleared with the rejected drafts": Fault(
        f"{POOL}.DeepSeekV4TokenToKVPool.clear_unaccepted_c128_draft_states",
        "accept_lens,\n            ring_size",
        "accept_lens - 1,\n            ring_size",
        "target.compressor",
    ),
    "drafts overwrite what the compressor of ratio 128 keeps": Fault(
        f"{POOL}.DeepSeekV4TokenToKVPool.clear_unaccepted_c128_draft_states",
        "seq_lens,\n            accept_lens",
        "seq_lens - 2,\n            accept_lens",
        "target.compressor",
    ),
    "halves of the overlapping biases are swapped": Fault(
        "sglang.srt.layers.attention.dsv4.compressor.Compressor._apply_ape_hotfix",
        "ape = torch.cat([ape[0], ape[1]], dim=0)",
        "ape = torch.cat([ape[1], ape[0]], dim=0)",
        "target.kv",
    ),
    "layers that compress nothing turn by the base of the others": Fault(
        f"{MODEL}.MqaAttentionBase.__init__",
        "config.compress_rope_theta if self.compress_ratio else rope_theta",
        "config.compress_rope_theta",
        "target.kv",
    ),
    "the table of experts is read for another row's token": Fault(
        "sglang.srt.layers.moe.hash_topk.HashTopK._forward_torch",
        "topk_ids[:, :] = self.tid2eid[input_ids]",
        "topk_ids[:, :] = self.tid2eid[input_ids.roll(1, 0)]",
        "target.compressor",
    ),
    "heads have the sinks of others": Fault(
        f"{MODEL}.MqaAttentionBase._local_attn_sink",
        "return self.attn_sink\n",
        "return self.attn_sink.flip(0) * 4\n",
        "target.compressor",
    ),
    "verify stores a row as of the position behind it": Fault(
        _STORE,
        "positions=positions,\n        # the query RoPE",
        "positions=positions + int(forward_batch.forward_mode.is_target_verify()),\n        # the query RoPE",
        "target.kv",
    ),
    "draft extend stores a row as of the position behind it": Fault(
        _STORE,
        "positions=positions,\n        # the query RoPE",
        "positions=positions + int(forward_batch.forward_mode.is_draft_extend_v2()),\n        # the query RoPE",
        "draft.kv",
    ),
    "draft decode stores the row of another request": Fault(
        _STORE,
        "kv=kv,\n        kv_weight",
        "kv=kv.flip(0) if forward_batch.forward_mode.is_decode() else kv,\n        kv_weight",
        "draft.scratch_kv",
    ),
    "the draft reads the streams in another order": Fault(
        f"{NEXTN}.forward",
        "h_proj_hidden_states = h_proj_out.view(n_tokens, self.hc_mult, d)",
        "h_proj_hidden_states = h_proj_out.view(n_tokens, self.hc_mult, d).flip(1) * 3",
        "draft.kv",
    ),
}


@pytest.fixture(scope="module")
def in_bfloat16(host: Host) -> object:
    with in_mode(host, Mode(dtype="bfloat16")) as other:
        yield other


@pytest.fixture(scope="module")
def mended(in_bfloat16: Host, chain: Case, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """With the candidate fix of a live bug."""
    return in_bfloat16.engine(chain, (Patch(name="mended", edits=REMEDY),)).run(chain, tmp_path_factory.mktemp("mended"))


@pytest.mark.slow
def test_a_chain_is_equal_with_the_candidate_fix_of_a_live_bug(mended: Trace) -> None:
    verdict = judge(mended)
    assert verdict.status == "equal", (verdict, mended.header.ending)
    assert {"target.compressor", "target.kv", "draft.scratch_kv"} <= {name for name, count in verdict.checked.items() if count}
    assert verdict.headroom < 0.5  # of the bound of bfloat16, with FP8


@pytest.mark.slow
def test_a_changed_number_of_a_compressor_is_named(mended: Trace) -> None:
    places = [(n, name) for n, one in enumerate(mended.header.records) for name in one.tensors if name.startswith("compressor")]
    number, name = [place for place in places if mended.tensor(*place).numel()][-1]
    wrong = mended.tensor(number, name).clone()
    wrong.view(-1)[-1] += 1 + wrong.abs().max()
    verdict = judge(changed(mended, {f"{number}.{name}": wrong}))
    assert (verdict.status, verdict.rule) == ("diverged", "target.compressor"), verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", long(*FAULTS))
def test_a_fault_is_named_by_its_rule(
    in_bfloat16: Host, chain: Case, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fault = FAULTS[name]
    planted = Edit(target=fault.target, match=fault.match, replacement=fault.replacement)
    trace = in_bfloat16.engine(chain, (Patch(name="planted", edits=(*REMEDY, planted)),)).run(
        chain, tmp_path_factory.mktemp("planted")
    )
    verdict = judge(trace)
    assert (verdict.status, verdict.rule) == ("diverged", fault.rule), (verdict, trace.header.ending)
