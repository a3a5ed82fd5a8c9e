"""What the judge says: a verdict, and each divergence as something that can be argued about.

A verdict is `equal`, `diverged` or `unknown`; unknown is never a pass. RULES names everything that is checked, with the
sentence of DESIGN that it enforces. Kept apart from the judge so that rules and entries can be named before torch is imported.
"""

from typing import Literal

from msgspec import Struct

# What a node of a draft tree attends to (reference/growth.py); what a stored row of a multi-layer draft is (reference/mtp.py).
View = Literal["slot_layout", "true_tree", "last_fed", "committed"]

# As declared. Every release so far stores a branch's keys by its number (PR #8409, never merged): ledger entry 8409 shows it.
# And leaves rows that were fed a rejected draft as they are, but for hybrid models: entry boundary-kv shows it.
DECLARED_VIEW: View = "slot_layout"

# Rule -> (DESIGN section, what must hold). Names are stable: the kind of a divergence, and a column of the reports.
RULES: dict[str, tuple[str, str]] = {
    "draft.input_ids": (
        "3.1-3.3",
        "Row i of the draft consumes token x[i+1]: at a chunk's tail the next prompt token, in draft decode the token drafted "
        "one step before.",
    ),
    "draft.positions": (
        "3.1-3.3",
        "Row i of the draft stands at position i; draft decode step j stands at position M + j - 1.",
    ),
    "draft.slots": (
        "4",
        "Every written slot is the request's own entry of req_to_token for its column, and nobody else's; no entry changes "
        "behind its back.",
    ),
    "draft.runner": (
        "3.7",
        "The forward of layer k of a multi-layer draft uses layer k's own attention backend and pools.",
    ),
    "draft.hidden_in": (
        "3.1-3.3",
        "Row i of the draft consumes the target's hidden state h[i]; draft decode consumes the draft's own state of the row "
        "that proposed its token.",
    ),
    "draft.scratch_kv": (
        "3.3",
        "When draft() returns, the rows that draft decode wrote are those of the tokens it consumed, at M..M+num_steps-2.",
    ),
    "draft.kv": (
        "3.1",
        "The draft's stored row i is a function of x[0..i+1] alone, for every committed position.",
    ),
    "target.inputs": ("3.6", "The target consumes the prompt's tokens at their positions, and writes the request's own slots."),
    "target.hidden": (
        "2",
        "For every committed row the target hands the draft its hidden state h[i], the one that the recipe declares.",
    ),
    "target.kv": ("3.6", "The target's stored row i is a function of x[0..i] alone, for every committed position."),
    "draft.proposal": ("3.3", "Each row proposes the topk tokens of its largest logits, best first."),
    "tree.parents": (
        "3.4",
        "A frontier holds the topk best candidates of its depth, best first, and each node has a node for a parent.",
    ),
    "tree.tokens": (
        "3.4",
        "The verify tree is the num_draft_tokens - 1 best of all candidates, in the order of their numbers.",
    ),
    "tree.positions": ("3.4", "Node n of the verify tree stands at position M + its depth."),
    "tree.mask": ("3.4", "A node sees the committed prefix, its own ancestors and itself."),
    "tree.retrieve": ("3.4", "The links of each node lead to its first child and to its parent's next child."),
    "verify.inputs": ("3.5", "The target verifies x[M] and the nodes of the tree, at M + their depths."),
    "verify.accept": (
        "3.5",
        "Verify goes from node to the child that equals the target's argmax, and commits the argmax after the last as bonus.",
    ),
    "verify.coins": (
        "3.5",
        "Coins are numbers from 0 to below 1, no two rounds share theirs, nor, twice in a trace, a single one with the round "
        "before or with a request beside it, and those of a seeded request are hashed from its seed, its length and the node.",
    ),
    "verify.probabilities": (
        "3.5",
        "Verify samples from softmax(logits / temperature) of the target at each accepted node, cut at top_k, then at top_p.",
    ),
    "draft.probabilities": (
        "3.5",
        "What rejection sampling holds a draft token to be drawn from is softmax(logits / temperature) of the draft's row that "
        "proposed it.",
    ),
    "commit.path": (
        "3.6",
        "The accepted path is moved to the front: its KV rows in the target's pool, its predicted tokens, its hidden states.",
    ),
    "output.tokens": ("3.9", "The emitted tokens equal plain greedy decoding of the target, up to the finished length."),
    "pool.accounting": (
        "4",
        "Free, cached and held slots are disjoint and make up the pool; after everything is done and flushed, all are free.",
    ),
    "schedule.events": (
        "4",
        "An aborted request ends within a step, a retracted one starts again with a prefill, nothing runs in a pause, and an "
        "idle scheduler's cache is empty after a flush.",
    ),
    "ranks.agree": (
        "4",
        "All ranks of a tensor-parallel worker come to the same integers: tokens, positions, slots, trees, paths, counts.",
    ),
    "kernel.memory": (
        "5",
        "A kernel reads and writes only elements of the tensors it was given, and raw addresses only KV pools.",
    ),
    "kernel.undefined": ("5", "What a kernel stores does not depend on memory or lanes that nobody defined."),
    "kernel.order": ("5", "What a kernel stores does not depend on the order of its programs."),
    "kernel.shadow": ("5", "The fast runtime stores what Triton's interpreter stores."),
    "engine.crash": ("4", "The worker survives every valid case."),
    "engine.hang": ("4", "The worker finishes every valid case."),
}


# What holds instead of a multi-layer draft.
LAYER_RULES: dict[str, tuple[str, str]] = {
    "draft.input_ids": (
        "3.7",
        "Row i of layer k consumes token x[i+1+k]: at a chunk's tail the prompt's; past what is known yet, the drafts so far.",
    ),
    "draft.hidden_in": (
        "3.7",
        "Row i of every layer consumes the target's hidden state h[i]; in a chained model, the state of the layer below for "
        "the same row.",
    ),
    "draft.kv": (
        "3.7",
        "Layer k's stored row i is that of the token it was last fed, which is x[i+1+k] unless it was written before that was "
        "known; with `--view committed`, that of x[i+1+k].",
    ),
}


class Divergence(Struct, frozen=True, kw_only=True):
    """The first number, of one request in one stage, that is not what it must be.

    rank  the one that it was found on, where there are several
    """

    rule: str
    request: str
    round: int
    stage: str
    step: int
    layer: int = 0
    rank: int | None = None
    iteration: int
    index: str
    expected: str
    actual: str
    why: str = ""

    @property
    def signature(self) -> tuple[str, str, int, str, int, int, int | None, str, str, str]:
        """What two runs must share to have diverged in the same way (iteration is left out: overlap shifts it)."""
        return (*self.place, self.index, self.expected, self.actual)

    @property
    def place(self) -> tuple[str, str, int, str, int, int, int | None]:
        """Rule and record: where two runs diverge alike whose wrong numbers are not the same."""
        return (self.rule, self.request, self.round, self.stage, self.step, self.layer, self.rank)


class Verdict(Struct, frozen=True, kw_only=True):
    """status, and what it rests on.

    first      the first divergence in the order in which data flows; None if equal
    rule       its rule; for `unknown`, engine.crash or engine.hang if that is why
    later      how many more numbers diverged after it, by rule
    reason     why it is unknown
    vacuous    unknown for no other reason than that the case did not reach what it is for, or what a patch edits
    choices    argmax choices that were compared; ties: those which the reference itself cannot decide; adopted: those of
               them in which the engine's choice was another one, and was followed
    exercised  features of the case that really happened (see exercised.py)
    checked    how many records each rule looked at: a rule that looked at nothing proves nothing
    unseen     how many comparisons of a rule could not be made: what they look at ran in a CUDA graph
    without    rules that were switched off
    view       what a node of a draft tree was held to attend to, or a stored row to be, if that is not what is declared
    headroom   largest float error found among equal numbers, as a share of its bound
    """

    status: Literal["equal", "diverged", "unknown"]
    rule: str = ""
    first: Divergence | None = None
    later: dict[str, int] = {}
    reason: str = ""
    vacuous: bool = False
    choices: int = 0
    ties: int = 0
    adopted: int = 0
    exercised: tuple[str, ...] = ()
    checked: dict[str, int] = {}
    unseen: dict[str, int] = {}
    without: tuple[str, ...] = ()
    view: str = ""
    headroom: float = 0.0
