"""The multi-step draft backends of DeepSeek-V4 and of DSA, their own classes on a tiny configuration: what they plan for each
step of a chain."""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagletwin.cases.ledger import PROBES
from eagletwin.harness.commands.kernels.properties import draft_plans
from eagletwin.harness.commands.kernels.properties.draft_plans import (
    Chains,
    each_step_plans_its_row,
    each_step_plans_what_it_may_read,
)
from eagletwin.harness.commands.kernels.release import DSA, DSV4, DSV4_PLANS, UTILS, load, module
from eagletwin.harness.commands.kernels.runtime import plant_fault
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.sglang.call_function import PAGE_SIZE, StepPlan, draft_backend, dsa_draft_backend, plan_of

from .cuts import make_tests

test_property, test_planted_fault_is_caught = make_tests(draft_plans)

CHAIN = Chains(lengths=(5, 255), rows=(0, 3), num_steps=4)


def built(case: Chains, of: str = DSV4) -> AbstractContextManager[Any]:
    """The backend of this module, which is imported as the tier does, whichever test comes first."""
    module(of)
    return (
        draft_backend(case.table, case.window, case.num_steps) if of == DSV4 else dsa_draft_backend(case.table, case.num_steps)
    )


def planned(case: Chains, of: str = DSV4) -> list[StepPlan]:
    with built(case, of) as backend:
        return case.planned(backend)


def planned_for_a_replay(case: Chains, of: str = DSV4) -> list[StepPlan]:
    """What is prepared before a CUDA graph is replayed, and then what the graph has recorded, which runs here as it is."""
    count = len(case.lengths)

    def batch(lengths: tuple[int, ...], rows: tuple[int, ...], slots: list[int]) -> SimpleNamespace:
        held, decode = torch.tensor(lengths), module("sglang.srt.model_executor.forward_batch_info").ForwardMode.DECODE
        return SimpleNamespace(
            batch_size=count,
            forward_mode=decode,
            actual_forward_mode=decode,
            input_ids=torch.zeros_like(held),
            positions=held.clone(),
            req_pool_indices=torch.tensor(rows),
            seq_lens=held,
            seq_lens_cpu=held,
            seq_lens_sum=sum(lengths),
            out_cache_loc=torch.tensor(slots),
            spec_info=None,
        )

    captured = batch((1,) * count, tuple(range(count)), [0] * count * case.num_steps)
    replayed = batch(case.lengths, case.rows, [slot for own in case.slots for slot in own])
    with built(case, of) as backend:
        backend.init_cuda_graph_state(count, count)
        backend.init_forward_metadata_out_graph(captured, in_capture=True)
        backend.init_forward_metadata_in_graph(captured)
        if of == DSV4:
            backend.on_after_cuda_graph_warmup()
        backend.init_forward_metadata_out_graph(replayed)
        backend.init_forward_metadata_in_graph(replayed)
        return [plan_of(of) for of in backend.attn_backends[: case.num_steps - 1]]


def test_the_classes_are_sglangs_own() -> None:
    backend = module(DSV4)
    with draft_backend(CHAIN.table, CHAIN.window, 3) as found:
        assert type(found) is backend.DeepseekV4MultiStepBackend
        assert [type(of) for of in found.attn_backends] == [backend.DeepseekV4AttnBackend] * 3
        assert type(found.token_to_kv_pool).__name__ == "DeepSeekV4TokenToKVPool"


def test_without_the_fix_of_26239_the_backend_refuses_the_slots_of_all_steps() -> None:
    revert = PROBES["26239"].revert
    assert revert is not None
    with plant_fault(revert.edits[0]), pytest.raises(AssertionError, match=r"out_cache_loc\.shape=torch\.Size\(\[8\]\)"):
        planned(CHAIN)


@pytest.mark.parametrize("of", [DSV4, DSA])
def test_no_step_reads_a_row_of_the_chain(of: str) -> None:
    """The ledger's dsv4-draft-reads and dsa-draft-reads, live: every step stands at M - 1 and reads what lies before it."""
    steps, replayed = planned(CHAIN, of), planned_for_a_replay(CHAIN, of)
    assert [step.length for step in (*steps, *replayed)] == [list(CHAIN.lengths)] * 6
    assert [step.reads for step in (*steps, *replayed)] == [steps[0].reads] * 6


def test_a_replay_has_each_steps_slots_in_the_windows_pool_and_the_batchs_first_for_what_compresses() -> None:
    """The list of all steps' slots is cut to the size of the batch, and the first step's plan serves all. No draft layer
    compresses, so that nothing is written there."""
    assert [of.window_writes for of in planned_for_a_replay(CHAIN)] == [of.window_writes for of in planned(CHAIN)]
    assert [of.writes for of in planned_for_a_replay(CHAIN)] == [CHAIN.slots[0][:2]] * 3


def mended(name: str) -> ExitStack:
    """With this bug's candidate fix."""
    remedy, stack = PROBES[name].remedy, ExitStack()
    assert remedy is not None
    for edit in remedy.edits:
        stack.enter_context(plant_fault(edit))
    return stack


def test_with_the_candidate_fix_each_step_reads_its_own_row_and_those_before() -> None:
    with mended("dsv4-draft-reads"):
        each_step_plans_its_row(CHAIN)
        steps = planned(CHAIN)
        assert [of.reads for of in planned_for_a_replay(CHAIN)] == [of.reads for of in steps]
    assert [of.length for of in steps] == [[6, 256], [7, 257], [8, 258]]
    assert [[reads[-1] for reads in of.reads] for of in steps] == [of.window_writes for of in steps]
    assert CHAIN.lengths[1] + 3 > PAGE_SIZE  # the last steps of one request lie in the next page


@pytest.mark.parametrize("num_steps", [2, 3, 4, 5])  # SGLang copies plans of more than three steps in another way
def test_with_the_candidate_fix_each_step_of_dsa_may_read_its_own_row(num_steps: int) -> None:
    case = replace(CHAIN, num_steps=num_steps)
    with mended("dsa-draft-reads"):
        each_step_plans_what_it_may_read(case)
        steps, replayed = planned(case, DSA), planned_for_a_replay(case, DSA)
    assert [of.length for of in steps] == [[m + step for m in case.lengths] for step in range(1, num_steps)]
    assert [[reads[-1] for reads in of.reads] for of in steps] == [list(of) for of in zip(*case.slots, strict=True)][:-1]
    for eager, of in zip(steps, replayed, strict=True):
        assert (of.length, of.reads, of.chosen) == (eager.length, eager.reads, eager.chosen)
        width = len(eager.pages[0])  # a graph's table is as wide as the context
        assert [row[:width] for row in of.pages] == eager.pages


def test_the_plan_of_compression_takes_slots_as_if_they_lay_side_by_side() -> None:
    """Those of a step are a view with a stride. No draft layer compresses, so that nothing uses what comes of it."""
    lengths = torch.tensor([4, 8], dtype=torch.int32)
    slots = load(UTILS).per_step_draft_out_cache_loc(torch.arange(6), 2, 1, 3)[0]
    compression = module(f"{DSV4_PLANS.rpartition('.')[0]}.metadata_kernel").init_compression_metadata
    compression(lengths, lengths - 1, slots.contiguous(), compute_page_indices=False)
    with pytest.raises(triton_cpu.OutOfBounds, match=r"raw_out_loc_ptr.*in a gap between the view's rows"):
        compression(lengths, lengths - 1, slots, compute_page_indices=False)
    triton_cpu.clear()


WIDTH = 4


def extended_for_a_replay() -> list[int]:
    """Lengths of the rows of draft extend that are planned before a replay of a graph for two requests: one of 9 rows, and
    padding."""
    mode = module("sglang.srt.model_executor.forward_batch_info").ForwardMode.DRAFT_EXTEND_V2
    with draft_backend(CHAIN.table, CHAIN.window, CHAIN.num_steps) as backend:
        of = backend.attn_backends[0]
        of.init_cuda_graph_state(2, 2 * WIDTH)
        lengths = torch.tensor([9, of.get_cuda_graph_seq_len_fill_value()])
        batch = SimpleNamespace(
            batch_size=2,
            forward_mode=mode,
            actual_forward_mode=mode,
            req_pool_indices=torch.tensor([1, 0]),
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            seq_lens_sum=int(lengths.sum()),
            out_cache_loc=torch.zeros(2 * WIDTH, dtype=torch.int64),
            spec_info=None,
        )
        of.init_forward_metadata_out_graph(batch)
        planned: list[int] = of.forward_metadata.core_attn_metadata.swa_topk_lengths.tolist()
        return planned


def test_padded_rows_of_draft_extend_have_lengths_below_zero() -> None:
    """PR #31270, open: padding has a length of 1, and a row's length is that of the request less those after it."""
    assert extended_for_a_replay() == [6, 7, 8, 9, -2, -1, 0, 1]


def test_with_the_candidate_fix_of_31270_padded_rows_have_a_length_of_one() -> None:
    fix = Edit(
        target=f"{DSV4}.DeepseekV4AttnBackend.expand_extend_with_same_length",
        match="seq_lens_casual = seq_lens_casual.flatten()",
        replacement="seq_lens_casual = seq_lens_casual.flatten().clamp(min=1)",
    )
    with plant_fault(fix):
        assert extended_for_a_replay() == [6, 7, 8, 9, 1, 1, 1, 1]
