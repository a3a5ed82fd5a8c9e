"""Where rows lie: which column of a request's row of req_to_token each stage writes. Integers alone; SGLang's own conventions.

Committed position i lies in column i. Everything a round writes before its verify is over lies from column M on: draft
decode by branch and step, then, over it, the nodes that the target verifies.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .sizes import branch_pages


def draft_columns(committed: int, topk: int, num_steps: int, page_size: int) -> Tensor:
    """Columns of draft decode [num_steps, topk]: entry [j-1, b] is where step j writes branch b's row. M = committed.

    A chain, and branches of page_size 1: branch b has the num_steps columns from M + b * num_steps on. With pages, branches
    share none: branch b's region begins b * branch_pages pages after the page that M lies in, with as many holes as that page
    holds committed rows. The last step's columns are allocated and never written: num_steps - 1 forwards run.
    """
    steps, branches = torch.arange(num_steps)[:, None], torch.arange(topk)[None, :]
    if topk == 1 or page_size == 1:
        return committed + branches * num_steps + steps
    inside = committed % page_size
    region = branch_pages(committed, num_steps, page_size) * page_size
    return committed - inside + branches * region + inside + steps


def hole_columns(committed: int, topk: int, num_steps: int, page_size: int) -> Tensor:
    """Columns [topk - 1, M % page_size] of the holes of branches 1..: each must hold a copy of the prefix's partial page.

    Branch 0's region begins with that page itself. Kernels that read whole pages read the holes.
    """
    inside = committed % page_size if topk > 1 else 0
    region = branch_pages(committed, num_steps, page_size) * page_size if page_size > 1 else 0
    return committed - inside + torch.arange(1, topk)[:, None] * region + torch.arange(inside)[None, :]


def verify_columns(committed: int, num_draft_tokens: int) -> Tensor:
    """Columns of the nodes [num_draft_tokens]: node n in column M + n, whatever its depth."""
    return committed + torch.arange(num_draft_tokens)


def draft_reads(
    committed: int, branch: int, step: int, topk: int, num_steps: int, page_size: int, recent: int, sink: int
) -> Tensor:
    """Columns that branch `branch` reads in the forward of step 1, 2, ..: the prefix, then its own columns up to this step's.

    By branch number, not by parent (the ledger's slot layout). recent > 0: of the prefix only the first `sink` positions and
    the last `recent`, where it is longer than both.
    """
    prefix = torch.arange(committed)
    if recent and committed > recent + sink:
        prefix = torch.cat([prefix[:sink], prefix[committed - recent :]])
    return torch.cat([prefix, draft_columns(committed, topk, num_steps, page_size)[:step, branch]])


def physical_slot(slot: int, pages: Sequence[int], page_size: int) -> int:
    """Where a virtual slot lies: pages[p] is the physical page of virtual page p. 0, which takes padding, if there is none."""
    page, inside = divmod(slot, page_size)
    if not 0 <= page < len(pages) or pages[page] < 0:
        return 0
    return pages[page] * page_size + inside
