"""PR #25015: draft decode stood one position too far.

The worker moved `positions` on before each draft forward instead of after it, so decode step j ran at M + j. The draft's
rotary embedding, and so its KV rows and proposals, were off by one; verification hid it.

A second part of it moves `positions` back at the end of what a CUDA graph captures. It changes no number of any release that
has it: from 0.5.12 to 0.5.23 the runner copies the batch's positions before each replay, clears those of padding, and nothing
reads them after it. Undone alone in 0.5.17, 0.5.20 and 0.5.23, in graphs on a CPU, it left chains, trees, pages of 2 tokens
and EAGLE-3 as they were. Only a capture sees it: the plan of the next size counts further rows, whose results are dropped.
"""

from ..entry import Entry, Loses, Patch, Request, small_case

ENTRY = Entry(
    id="25015",
    title="Fix Eagle draft decode positions",
    rule="draft.positions",
    buggy="0.5.9 - 0.5.11",
    fixed="0.5.12",
    last_bad="0.5.11",
    trigger="num_steps >= 2 and a draft that uses positions; any topk, page size, batch",
    loses=Loses("always", layers=False, num_steps=2),
    revert=Patch(name="revert-25015", sglang_toggle=25015),
    case=small_case(Request(id="a", prompt=(7,), max_new_tokens=2), num_steps=2, exercises=("draft_decode",)),
)
