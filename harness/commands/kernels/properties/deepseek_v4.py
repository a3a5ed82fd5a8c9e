"""What DeepSeek-V4's multi-step draft backend plans for each step of a chain, without a CUDA graph: slots that a step writes,
and the window that it reads. The backend is SGLang's own, on a tiny configuration (engines/sglang/call_function.py).
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.harness.engines.sglang.call_function import PAGE_SIZE, WINDOW, draft_backend, plan
from eagletwin.reference.layout import draft_columns, draft_reads

from ..release import DSV4, DSV4_PLANS, module
from ..tier import Property, fault, same, true

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


@st.composite
def chains(draw: st.DrawFn) -> Chains:
    """Lengths around the ends of a page and of a window are among them; a page of the table stays free."""
    ends = st.sampled_from([PAGE_SIZE, WINDOW]).flatmap(lambda end: st.integers(end - 6, end + 1))
    lengths = draw(st.lists(st.one_of(st.integers(1, 700), ends), min_size=1, max_size=4))
    start = draw(st.integers(0, ROWS - 1))
    return Chains(tuple(lengths), tuple((start + 3 * i) % ROWS for i in range(len(lengths))), draw(st.integers(2, 5)))


def each_step_plans_its_row(case: Chains) -> None:
    """PR #26239, and which rows a step reads: the window that ends with the row where the step is told that it stands.

    It is told the committed length in every step, and so reads none of the chain's own rows (the ledger's dsv4-draft-reads).
    That is taken here as well as what is right.
    """
    module(DSV4)
    columns = [draft_columns(m, 1, case.num_steps, PAGE_SIZE)[:, 0] for m in case.lengths]
    slots = [case.table[row][of].tolist() for row, of in zip(case.rows, columns, strict=True)]
    with draft_backend(case.table, case.window, case.num_steps) as backend:
        plans = plan(backend, case.rows, case.lengths, [slot for of in slots for slot in of])
    same("steps with a plan", len(plans), case.num_steps - 1)  # the last one has no forward
    for step, of in enumerate(plans, 1):
        writes = [own[step - 1] for own in slots]
        same(f"slots written by step {step}", of.writes, writes)
        same(f"slots written by step {step} in the window's pool", of.window_writes, case.window[writes].tolist())
        told = (list(case.lengths), [m + step for m in case.lengths])
        true(f"lengths of step {step} are {told[1]}, or in every step {told[0]}: {of.length}", of.length in told)
        same(f"positions of step {step}", of.position, [length - 1 for length in of.length])
        same(f"slots read by step {step}", of.reads, [_window(case, step, r, of.length[r]) for r in range(len(case.rows))])
        same(f"pages of step {step}", of.pages, case.pages[list(case.rows)].tolist())


def _window(case: Chains, step: int, request: int, length: int) -> list[int]:
    """Slots in the window's pool of the last rows up to this length, the oldest first."""
    columns = draft_reads(case.lengths[request], 0, step, 1, case.num_steps, PAGE_SIZE, 0, 0)[:length][-WINDOW:]
    return case.window[case.table[case.rows[request]][columns]].tolist()


_STEP = f"{DSV4}.DeepseekV4AttnBackend"

PROPERTIES = (
    Property(
        chains(),
        each_step_plans_its_row,
        (
            fault(
                f"{DSV4}.DeepseekV4MultiStepBackend.init_forward_metadata",
                "range(self.speculative_num_steps - 1)",
                "range(self.speculative_num_steps - 2)",
            ),
            fault(f"{_STEP}._build_forward_metadata", "if self.topk > 0 and self.speculative_num_steps > 1:", "if False:"),
            fault(f"{_STEP}._build_forward_metadata", ")[self.speculative_step_id]", ")[0]"),
            fault(f"{_STEP}.init_forward_metadata_in_graph", ")[self.speculative_step_id]", ")[0]"),
            fault(
                f"{_STEP}.make_forward_metadata_from_raw_decode", "seq_lens_casual=seq_lens,", "seq_lens_casual=seq_lens - 1,"
            ),
            fault(f"{DSV4_PLANS}._page_table_positions_kernel", "seq_len - 1)", "seq_len)"),
            fault(
                f"{DSV4_PLANS}._causal_swa_page_indices_kernel", "off = pos - k.to(tl.int64)", "off = pos - 1 - k.to(tl.int64)"
            ),
        ),
    ),
)
