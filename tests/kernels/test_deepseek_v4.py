"""DeepSeek-V4's multi-step draft backend, its own classes on a tiny configuration: what it plans for each step of a chain."""

import pytest
import torch

from eagletwin.cases.regressions import PROBES
from eagletwin.harness.commands.kernels.plant import planted
from eagletwin.harness.commands.kernels.properties.deepseek_v4 import PROPERTIES, Chains, each_step_plans_its_row
from eagletwin.harness.commands.kernels.release import DSV4, DSV4_PLANS, UTILS, load, module
from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.sglang.deepseek_v4 import PAGE_SIZE, StepPlan, draft_backend, plan

from .tests_of import make_tests

test_property, test_planted_fault_is_caught = make_tests(PROPERTIES)

CHAIN = Chains(lengths=(5, 255), rows=(0, 3), num_steps=4)


def planned(case: Chains) -> list[StepPlan]:
    slots = [case.table[row][m : m + case.num_steps].tolist() for row, m in zip(case.rows, case.lengths, strict=True)]
    with draft_backend(case.table, case.window, case.num_steps) as backend:
        return plan(backend, case.rows, case.lengths, [slot for of in slots for slot in of])


def test_the_classes_are_sglangs_own() -> None:
    backend = module(DSV4)
    with draft_backend(CHAIN.table, CHAIN.window, 3) as found:
        assert type(found) is backend.DeepseekV4MultiStepBackend
        assert [type(of) for of in found.attn_backends] == [backend.DeepseekV4AttnBackend] * 3
        assert type(found.token_to_kv_pool).__name__ == "DeepSeekV4TokenToKVPool"


def test_without_the_fix_of_26239_the_backend_refuses_the_slots_of_all_steps() -> None:
    revert = PROBES["26239"].revert
    assert revert is not None
    with planted(revert.edits[0]), pytest.raises(AssertionError, match=r"out_cache_loc\.shape=torch\.Size\(\[8\]\)"):
        planned(CHAIN)


def test_no_step_reads_a_row_of_the_chain() -> None:
    """The ledger's dsv4-draft-reads, live: every step stands at M - 1 and reads what lies before it."""
    assert [of.length for of in planned(CHAIN)] == [list(CHAIN.lengths)] * 3
    assert [of.reads for of in planned(CHAIN)] == [planned(CHAIN)[0].reads] * 3


def test_with_the_candidate_fix_each_step_reads_its_own_row_and_those_before() -> None:
    remedy = PROBES["dsv4-draft-reads"].remedy
    assert remedy is not None
    with planted(remedy.edits[0]):
        each_step_plans_its_row(CHAIN)
        steps = planned(CHAIN)
    assert [of.length for of in steps] == [[6, 256], [7, 257], [8, 258]]
    assert [[reads[-1] for reads in of.reads] for of in steps] == [of.window_writes for of in steps]
    assert CHAIN.lengths[1] + 3 > PAGE_SIZE  # the last steps of one request lie in the next page


def test_the_plan_of_compression_takes_slots_as_if_they_lay_side_by_side() -> None:
    """Those of a step are a view with a stride. No draft layer compresses, so that nothing uses what comes of it."""
    lengths = torch.tensor([4, 8], dtype=torch.int32)
    slots = load(UTILS).per_step_draft_out_cache_loc(torch.arange(6), 2, 1, 3)[0]
    compression = module(f"{DSV4_PLANS.rpartition('.')[0]}.metadata_kernel").init_compression_metadata
    compression(lengths, lengths - 1, slots.contiguous(), compute_page_indices=False)
    with pytest.raises(triton_cpu.OutOfBounds, match=r"raw_out_loc_ptr.*in a gap between the view's rows"):
        compression(lengths, lengths - 1, slots, compute_page_indices=False)
    triton_cpu.clear()
