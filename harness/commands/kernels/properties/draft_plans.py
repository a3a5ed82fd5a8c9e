"""What the multi-step draft backends of DeepSeek-V4 and of DSA plan for each step of a chain, without a CUDA graph: the rows
that a step reads, and V4 the slots that it writes. The backends are SGLang's own, on a tiny configuration
(engines/sglang/call_function.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.harness.engines.sglang.call_function import (
    DSA_PAGE,
    DSA_TOPK,
    PAGE_SIZE,
    WINDOW,
    StepPlan,
    draft_backend,
    dsa_draft_backend,
    plan,
)
from eagletwin.reference.layout import draft_columns, draft_reads

from ..release import DSA, DSV4, DSV4_PLANS, module
from ..tier import fault, holds_for, same, true

ROWS, PAGES = 8, 4  # of req_to_token, and of each row


@dataclass(frozen=True)
class Chains:
    """Committed lengths of a batch's requests, the rows of req_to_token that they have, and the number of steps."""

    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    num_steps: int

    @property
    def pages(self) -> Tensor:
        """Pages of each row [ROWS, PAGES], far apart."""
        return (torch.arange(ROWS * PAGES) * 7 % (ROWS * PAGES)).reshape(ROWS, PAGES)

    @property
    def table(self) -> Tensor:
        """req_to_token [ROWS, PAGES * PAGE_SIZE] int32"""
        return (self.pages[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).reshape(ROWS, -1).int()

    @property
    def window(self) -> Tensor:
        """Slot in the window's pool of each slot [slots + 1]: pages in another order, and -1 at the end."""
        pages = torch.arange(ROWS * PAGES) * 5 % (ROWS * PAGES)
        slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).reshape(-1)
        return torch.cat([slots, torch.tensor([-1])])

    @property
    def slots(self) -> list[list[int]]:
        """Slots that the worker allots to each request: num_steps of them."""
        columns = [draft_columns(m, 1, self.num_steps, PAGE_SIZE)[:, 0] for m in self.lengths]
        return [self.table[row][of].tolist() for row, of in zip(self.rows, columns, strict=True)]

    def planned(self, backend: Any) -> list[StepPlan]:
        return plan(backend, self.rows, self.lengths, [slot for of in self.slots for slot in of])

    def reads(self, request: int, step: int, length: int) -> Tensor:
        """Slots of the rows up to this length, of those that step 1, 2, .. is to read."""
        columns = draft_reads(self.lengths[request], 0, step, 1, self.num_steps, PAGE_SIZE, 0, 0)[:length]
        return self.table[self.rows[request]][columns]


@st.composite
def chains(draw: st.DrawFn) -> Chains:
    """Lengths around the ends of a page and of a window are among them; a page of the table stays free."""
    ends = st.sampled_from([PAGE_SIZE, WINDOW]).flatmap(lambda end: st.integers(end - 6, end + 1))
    lengths = draw(st.lists(st.one_of(st.integers(1, 700), ends), min_size=1, max_size=4))
    start = draw(st.integers(0, ROWS - 1))
    return Chains(tuple(lengths), tuple((start + 3 * i) % ROWS for i in range(len(lengths))), draw(st.integers(2, 5)))


_STEP = f"{DSV4}.DeepseekV4AttnBackend"


@holds_for(
    chains(),
    fault(
        f"{DSV4}.DeepseekV4MultiStepBackend.init_forward_metadata",
        "range(self.speculative_num_steps - 1)",
        "range(self.speculative_num_steps - 2)",
    ),
    fault(f"{_STEP}._build_forward_metadata", "if self.topk > 0 and self.speculative_num_steps > 1:", "if False:"),
    fault(f"{_STEP}._build_forward_metadata", ")[self.speculative_step_id]", ")[0]"),
    fault(f"{_STEP}.init_forward_metadata_in_graph", ")[self.speculative_step_id]", ")[0]"),
    fault(f"{_STEP}.make_forward_metadata_from_raw_decode", "seq_lens_casual=seq_lens,", "seq_lens_casual=seq_lens - 1,"),
    fault(f"{DSV4_PLANS}._page_table_positions_kernel", "seq_len - 1)", "seq_len)"),
    fault(f"{DSV4_PLANS}._causal_swa_page_indices_kernel", "off = pos - k.to(tl.int64)", "off = pos - 1 - k.to(tl.int64)"),
)
def each_step_plans_its_row(case: Chains) -> None:
    """PR #26239, and which rows a step of DeepSeek-V4 reads: the window that ends with the row where it stands."""
    module(DSV4)
    with draft_backend(case.table, case.window, case.num_steps) as backend:
        plans = case.planned(backend)
    _steps_and_lengths(case, plans)
    for step, of in enumerate(plans, 1):
        writes = [own[step - 1] for own in case.slots]
        same(f"slots written by step {step}", of.writes, writes)
        same(f"slots written by step {step} in the window's pool", of.window_writes, case.window[writes].tolist())
        same(f"positions of step {step}", of.position, [length - 1 for length in of.length])
        reads = [case.window[case.reads(r, step, length)[-WINDOW:]].tolist() for r, length in enumerate(of.length)]
        same(f"slots read by step {step}", of.reads, reads)
        same(f"pages of step {step}", of.pages, case.pages[list(case.rows)].tolist())


_PLAN = f"{DSA}.DeepseekSparseAttnBackend.init_forward_metadata"


@holds_for(
    chains(),
    fault(
        f"{DSA}.DeepseekSparseAttnMultiStepBackend.init_forward_metadata",
        "range(self.speculative_num_steps - 1)",
        "range(self.speculative_num_steps - 2)",
    ),
    fault(_PLAN, "draft_token_num = 0", "draft_token_num = 1"),
    fault(_PLAN, "forward_batch.req_pool_indices, :max_seqlen_k", "forward_batch.req_pool_indices - 1, :max_seqlen_k"),
    fault(_PLAN, "dsa_index_topk=self.dsa_index_topk,", "dsa_index_topk=self.dsa_index_topk + 1,"),
    fault(
        f"{DSA}.DeepseekSparseAttnBackend._transform_table_1_to_real",
        "0, max_seqlen_k, page_size",
        "1, max_seqlen_k, page_size",
    ),
)
def each_step_plans_what_it_may_read(case: Chains) -> None:
    """A step of DSA scores the rows up to its own, finds them by their pages, and attends to DSA_TOPK of them at most."""
    module(DSA)
    with dsa_draft_backend(case.table, case.num_steps) as backend:
        plans = case.planned(backend)
    _steps_and_lengths(case, plans)
    for step, of in enumerate(plans, 1):
        reads = [case.reads(r, step, length).tolist() for r, length in enumerate(of.length)]
        same(f"slots read by step {step}", of.reads, reads)
        same(f"rows chosen by step {step}", of.chosen, [min(length, DSA_TOPK) for length in of.length])
        pages = case.table[list(case.rows), : max(of.length) : DSA_PAGE] // DSA_PAGE
        same(f"pages of step {step}", of.pages, pages.tolist())


def _steps_and_lengths(case: Chains, plans: list[StepPlan]) -> None:
    """A step counts the committed rows, and those of the chain up to its own.

    Either backend counts the committed rows alone in every step, which therefore reads none of the chain's (the ledger's
    dsv4-draft-reads and dsa-draft-reads). That is taken here as well as what is right.
    """
    same("steps with a plan", len(plans), case.num_steps - 1)  # the last one has no forward
    for step, of in enumerate(plans, 1):
        known = (list(case.lengths), [m + step for m in case.lengths])
        true(f"lengths of step {step} are {known[1]}, or in every step {known[0]}: {of.length}", of.length in known)
