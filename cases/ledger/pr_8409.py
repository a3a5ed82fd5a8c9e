"""PR #8409 (never merged): a branch of the draft tree attends to its own number's earlier rows, not to its ancestors'.

SGLang stores the rows of draft decode by branch number and step. Where the frontier's order changes, a node on branch b
follows a parent that lies on another branch, and reads branch b's row in the parent's place. Hidden states do follow the
parent. Every release is so, and official EAGLE is not; it costs acceptance and never output. The judge declares it (DESIGN
3.4) and follows `slot_layout`; this entry shows that the true tree is another one. What it costs: docs/explanation/trees.md.
"""

from ..entry import Entry, Loses, Request, small_case

ENTRY = Entry(
    id="8409",
    title="Let each node of the draft tree attend to its own ancestors",
    rule="draft.proposal",
    buggy="0.5.9 -",
    trigger="topk > 1, num_steps >= 3, and a node expanded on another branch than its parent",
    loses=Loses("always", layers=False, tree=True, num_steps=3),
    view="true_tree",
    case=small_case(
        Request(id="a", prompt=(0,), max_new_tokens=2),
        num_steps=3,
        topk=2,
        num_draft_tokens=4,
        exercises=("tree", "branch_changes_parent"),
    ),
)
