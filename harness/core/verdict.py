"""What the judge says: a verdict, and each divergence as something that can be argued about.

A verdict is `equal`, `diverged` or `unknown`; unknown is never a pass. RULES names everything that is checked, with the
sentence of DESIGN that it enforces. Kept apart from the judge so that rules and entries can be named before torch is imported.
"""

from typing import Literal, NamedTuple

from msgspec import Struct

# What a node of a draft tree attends to (reference/growth.py); what a stored row of a multi-layer draft is (reference/mtp.py);
# `shifted`: a plain language model is held to what it computes of x[1..] at positions 0.. (reference/draft_heads.py).
View = Literal["slot_layout", "true_tree", "last_fed", "committed", "shifted"]

# As declared. Every release so far stores a branch's keys by its number (PR #8409, never merged): ledger entry 8409 shows it.
# And leaves rows that were fed a rejected draft as they are, but for hybrid models: entry boundary-kv shows it.
DECLARED_VIEW: View = "slot_layout"


class Rule(NamedTuple):
    """What must hold, and what it takes to check it.

    section  of docs/explanation/design.md
    weights  whether the reference must compute with the model's weights: `no`, what is compared follows from the tokens and
             from other integers of the trace (or the engine checks it as it runs); `in part`, some of it does; `yes`, nothing
    """

    section: str
    sentence: str
    weights: Literal["no", "in part", "yes"]


# Names are stable: the kind of a divergence, and a column of the reports. Rendered by rules.py.
RULES: dict[str, Rule] = {
    "draft.input_ids": Rule(
        "3.1-3.3",
        "Row i of the draft consumes token x[i+1]: at a chunk's tail the next prompt token, in draft decode the token "
        "drafted one step before.",
        weights="no",
    ),
    "draft.positions": Rule(
        "3.1-3.3",
        "Row i of the draft stands at position i; draft decode step j stands at position M + j - 1.",
        weights="no",
    ),
    "draft.slots": Rule(
        "4",
        "Every written slot is the request's own entry of req_to_token for its column, and nobody else's; no entry "
        "changes behind its back.",
        weights="no",
    ),
    "window.slots": Rule(
        "4",
        "A row of a layer with a window has a slot of the window's own, alone, for as long as a row to come may see it, and "
        "gives it back when none can.",
        weights="no",
    ),
    "draft.runner": Rule(
        "3.7",
        "The forward of layer k of a multi-layer draft uses layer k's own attention backend and pools.",
        weights="no",
    ),
    "draft.hidden_in": Rule(
        "3.1-3.3",
        "Row i of the draft consumes the target's hidden state h[i]; draft decode consumes the draft's own state of the "
        "row that proposed its token.",
        weights="yes",
    ),
    "draft.scratch_kv": Rule(
        "3.3",
        "When draft() returns, the rows that draft decode wrote are those of the tokens it consumed, at M..M+num_steps-2.",
        weights="yes",
    ),
    "draft.kv": Rule(
        "3.1",
        "The draft's stored row i is a function of x[0..i+1] alone, for every committed position.",
        weights="in part",
    ),
    "target.inputs": Rule(
        "3.6",
        "The target consumes the prompt's tokens at their positions, and writes the request's own slots.",
        weights="no",
    ),
    "target.hidden": Rule(
        "2",
        "For every committed row the target hands the draft its hidden state h[i], the one that the recipe declares.",
        weights="yes",
    ),
    "target.kv": Rule(
        "3.6",
        "The target's stored row i is a function of x[0..i] alone, for every committed position.",
        weights="yes",
    ),
    "target.state": Rule(
        "3.11",
        "After a commit the state of each layer that keeps one is the recurrence over x[0..i], i the last committed row: after "
        "verify that of the last accepted node.",
        weights="yes",
    ),
    "target.conv": Rule(
        "3.11",
        "After a commit the inputs that a layer's convolution keeps are those of the last committed rows, the newest last, and "
        "0 before the first.",
        weights="yes",
    ),
    "state.tracked": Rule(
        "3.11",
        "The state and the convolution's inputs that the prefix cache keeps of a prefix are those after its last row. It is "
        "handed those after the last step of a chunk that begins with a page, and when a request ends those after the last "
        "row on the grid that its rounds passed.",
        weights="yes",
    ),
    "draft.proposal": Rule("3.3", "Each row proposes the topk tokens of its largest logits, best first.", weights="in part"),
    "tree.parents": Rule(
        "3.4",
        "A frontier holds the topk best candidates of its depth, best first, and each node has a node for a parent.",
        weights="in part",
    ),
    "tree.tokens": Rule(
        "3.4",
        "The verify tree is the num_draft_tokens - 1 best of all candidates, in the order of their numbers.",
        weights="in part",
    ),
    "tree.positions": Rule("3.4", "Node n of the verify tree stands at position M + its depth.", weights="no"),
    "tree.mask": Rule("3.4", "A node sees the committed prefix, its own ancestors and itself.", weights="no"),
    "tree.retrieve": Rule(
        "3.4",
        "The links of each node lead to its first child and to its parent's next child.",
        weights="no",
    ),
    "verify.inputs": Rule("3.5", "The target verifies x[M] and the nodes of the tree, at M + their depths.", weights="no"),
    "verify.accept": Rule(
        "3.5",
        "Verify goes from node to the child that equals the target's argmax, and commits the argmax after the last as bonus. "
        "Where a request samples, its coins say which child and which bonus, and tokens have the target's distribution.",
        weights="in part",
    ),
    "verify.coins": Rule(
        "3.5",
        "Coins are at least 0 and below 1. No two rounds have the same coins, and at most one coin of a trace is also a coin "
        "of the round before it or of another request in its batch. The coins of a seeded request are hashed from its seed, "
        "its length and the node. Others are as torch.rand draws them: on a CPU, multiples of 2**-24.",
        weights="no",
    ),
    "verify.probabilities": Rule(
        "3.5",
        "Verify samples from softmax(logits / temperature) of the target at each accepted node, cut at top_k, at top_p and at "
        "min_p. Its logits are the reference's, within the bound; the distribution is that of exactly its logits, within the "
        "roundings of float32.",
        weights="yes",
    ),
    "draft.probabilities": Rule(
        "3.5",
        "The draft distribution q that rejection sampling uses is softmax(logits / temperature) of the draft's row that "
        "proposed the token.",
        weights="yes",
    ),
    "commit.path": Rule(
        "3.6",
        "The accepted path is moved to the front: its KV rows in the target's pool, its predicted tokens, its hidden states.",
        weights="in part",
    ),
    "grammar.mask": Rule(
        "3.9",
        "A prefill, and each node of a verify whose path the grammar knows, may give the tokens that go on with the text so "
        "far, those that end it where it is whole, and no others; of a request without a grammar, all.",
        weights="no",
    ),
    "output.grammar": Rule(
        "3.9",
        "A request with a grammar gets tokens that go on with the text so far, or end it where it is whole; one that ends it "
        "is its last.",
        weights="no",
    ),
    "output.tokens": Rule(
        "3.9",
        "The emitted tokens equal plain greedy decoding of the target, up to the finished length.",
        weights="in part",
    ),
    "output.finish": Rule(
        "3.9",
        "A request ends because it has max_new_tokens tokens, at the first of its stop tokens, with its grammar's text, or by "
        "an abort; its finish reason says which, with that length or token.",
        weights="no",
    ),
    "output.counts": Rule(
        "3.9",
        "The last message of a request counts its prompt's tokens, those that it was sent, those that its first prefill found "
        "in the prefix cache, its retractions, the rounds that gave it tokens, and the drafts that they accepted: all, and in "
        "how many rounds how many.",
        weights="no",
    ),
    "output.stream": Rule(
        "3.9",
        "Each token is sent once, in order, and to the detokenizer the same; completion_tokens counts what was sent. A "
        "streamed request is sent the tokens of each step in a message of their own.",
        weights="no",
    ),
    "output.logprobs": Rule(
        "3.9",
        "Of each token that a request is sent, and of the prompt's from where it asks, it is told the logarithm of its "
        "probability, of the best tokens there and of those that it names: the log_softmax of the target's row before it, for "
        "what is sent of that row's logits as the request wants them changed, divided by its temperature.",
        weights="in part",
    ),
    "output.hidden": Rule(
        "3.9",
        "A request that asks for hidden states is given those of the target that its tokens were chosen by: for its first "
        "token those of all rows of its prompt that were computed, and one for each other token; or the last token's alone.",
        weights="in part",
    ),
    "output.plain": Rule(
        "3.9",
        "Plain decode of the same engine, on the tokens that a greedy request was sent, has at each place the best token, by "
        "logits that count all that was sent before; and the request was sent the same one, but where penalties of a round "
        "count nothing of the round.",
        weights="yes",
    ),
    "radix.hit": Rule(
        "4",
        "A request is prefilled from behind the longest prefix of its tokens whose rows the prefix cache has, in whole pages, "
        "with those that its next row sees in a window, where layers keep states to where it has one, and no further than to "
        "the row from which it wants logprobs.",
        weights="no",
    ),
    "session.rows": Rule(
        "4",
        "A request of a session goes on behind the rows that the session keeps: all those of its tokens before the last one "
        "that the request before it was sent, and none of that token or behind it.",
        weights="no",
    ),
    "radix.kept": Rule(
        "4",
        "The prefix cache has the rows that a chunk or a prompt left, in whole pages, as long as its request runs, and those "
        "of the tokens that a request was sent when it ends.",
        weights="no",
    ),
    "state.slots": Rule(
        "4",
        "A request has one slot for its states, alone, and its forwards use that; free, held and cached slots are disjoint and "
        "make up the pool, and all are free after the flush.",
        weights="no",
    ),
    "pool.accounting": Rule(
        "4",
        "Free, cached and held slots, and those of sessions, are disjoint and make up the pool; a session that is closed holds "
        "none, and after everything is done and flushed, all are free.",
        weights="no",
    ),
    "schedule.events": Rule(
        "4",
        "An aborted request ends within a step, one that is aborted inside a step with what that gives; a retracted one"
        " starts again with a prefill, nothing runs in a pause, and an idle scheduler's cache is empty after a flush. No"
        " request is aborted for want of memory that nobody else holds and that is enough for it.",
        weights="no",
    ),
    "steps.chosen": Rule(
        "3.12",
        "With adaptive steps a round has as many draft steps as the policy makes of the drafts accepted so far, for the "
        "size of its batch.",
        weights="no",
    ),
    "steps.fed": Rule(
        "3.12",
        "The choice of steps is told the accepted drafts of each decode batch once, in order, before the next one begins; with "
        "overlap, before the one after that.",
        weights="no",
    ),
    "steps.parts": Rule(
        "3.12",
        "In a round with adaptive steps every part of the worker goes by the same number of draft steps.",
        weights="no",
    ),
    "ranks.agree": Rule(
        "4",
        "All ranks of a tensor-parallel worker come to the same integers: tokens, positions, slots, trees, paths, counts. All "
        "stages of a pipeline count the same slots, and send the same.",
        weights="no",
    ),
    "kernel.memory": Rule(
        "5",
        "A kernel reads and writes only elements of the tensors it was given, and raw addresses only KV pools.",
        weights="no",
    ),
    "kernel.undefined": Rule("5", "What a kernel stores does not depend on memory or lanes that nobody defined.", weights="no"),
    "kernel.order": Rule("5", "What a kernel stores does not depend on the order of its programs.", weights="no"),
    "kernel.shadow": Rule("5", "The fast runtime stores what Triton's interpreter stores.", weights="no"),
    "engine.crash": Rule("4", "The worker survives every valid case.", weights="no"),
    "engine.hang": Rule("4", "The worker finishes every valid case.", weights="no"),
}


# Rules of what is said of a request; a number that a release does not say is not seen.
SAID = frozenset({"output.finish", "output.counts", "output.stream", "output.logprobs", "output.hidden"})


# What holds instead of a multi-layer draft.
LAYER_RULES: dict[str, Rule] = {
    "draft.input_ids": Rule(
        "3.7",
        "Row i of layer k consumes token x[i+1+k]: at a chunk's tail the prompt's; past what is known yet, the drafts so far.",
        weights="no",
    ),
    "draft.hidden_in": Rule(
        "3.7",
        "Row i of every layer consumes the target's hidden state h[i]; in a chained model, the state of the layer below "
        "for the same row.",
        weights="yes",
    ),
    "draft.kv": Rule(
        "3.7",
        "Layer k's stored row i is the row of the token that the layer was last fed there: x[i+1+k], or what stood for it "
        "before it was known. With `--view committed` it is always the row of x[i+1+k]. A row that a request takes over from "
        "another consumed this request's token, as far as the keys of the prefix cache tell the two apart.",
        weights="in part",
    ),
}

# What holds instead of a draft that is a plain language model; in the view `shifted`: as of an EAGLE head.
PLAIN_RULES: dict[str, Rule] = {
    "draft.input_ids": Rule(
        "3.10",
        "Row i of the draft consumes token x[i]; draft decode begins with a step 0, which consumes the bonus token x[M], and "
        "step j consumes the token drafted one step before.",
        weights="no",
    ),
    "draft.positions": Rule(
        "3.10", "Row i of the draft stands at position i; draft decode step j stands at position M + j.", weights="no"
    ),
    "draft.scratch_kv": Rule(
        "3.10",
        "When draft() returns, the rows that draft decode wrote are those of the tokens it consumed, at M..M+num_steps-1.",
        weights="yes",
    ),
    "draft.kv": Rule(
        "3.10", "The draft's stored row i is a function of x[0..i] alone, for every committed position.", weights="in part"
    ),
}


def rules_of(layers: bool, plain: bool) -> dict[str, Rule]:
    """What must hold of a draft of several layers, of a plain language model, or of a single head."""
    return RULES | LAYER_RULES if layers else RULES | PLAIN_RULES if plain else RULES


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


class RequestShare(Struct, frozen=True, kw_only=True):
    """How much of one request was compared.

    rounds  that verified it, and those with a comparison; rows: that its prefills and rounds committed, and those of which any
            number was compared; rules: that had something to compare
    never   those of the rules of which no comparison could be made
    """

    rounds: int
    rounds_compared: int
    rows: int
    rows_compared: int
    rules: int
    never: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What of it is less than everything; empty: nothing."""
        kinds = (("rounds", self.rounds_compared, self.rounds), ("rows", self.rows_compared, self.rows))
        parts = (*kinds, ("rules", self.rules - len(self.never), self.rules))
        return ", ".join(f"{some} of {whole} {name}" for name, some, whole in parts if some < whole)


class Excuse(Struct, frozen=True, kw_only=True):
    """Why a number that is not the reference's own is no divergence.

    kind     tie: the reference cannot tell two choices apart, and the engine's was followed. nudge: the bias of an expert was
             larger by so much, as if the engine had decided ties of experts so. experts: rows went to the experts that the
             trace names. view: the case reached where the view differs from what the papers say
    rule     of a tie, with the request, round, stage and index of the choice
    part     of a nudge: whose expert it is
    view     its name
    """

    kind: Literal["tie", "nudge", "experts", "view"]
    rule: str = ""
    request: str = ""
    round: int = 0
    stage: str = ""
    index: str = ""
    part: str = ""
    expert: int = 0
    size: float = 0.0
    view: str = ""

    def __str__(self) -> str:
        if self.kind == "tie":
            where = f"request {self.request}, round {self.round}, {self.stage}, {self.index}"
            return f"tie adopted: {self.rule}, {where}"
        if self.kind == "nudge":
            return f"nudge: the bias of expert {self.expert} of the {self.part} is larger by {self.size:.3g}"
        return f"view: {self.view}" if self.kind == "view" else "experts: rows go to those that the trace names"


# Excuses that a verdict names; it counts all of them.
MOST_EXCUSES = 20


class Verdict(Struct, frozen=True, kw_only=True):
    """status, and what it rests on.

    first      the first divergence in the order in which data flows; None if equal
    rule       its rule; for `unknown`, engine.crash or engine.hang if that is why
    later      how many more numbers diverged after it, by rule
    reason     why it is unknown
    vacuous    unknown for no other reason than that the case did not reach what it is for, or what a patch edits, or that `gap`
    gap        what of a request was never compared, and the case does not declare
    undecided  unknown for no other reason than that the reference cannot tell: too many ties, cuts in doubt, no reference for
               what was drawn and lost
    choices    argmax choices that were compared; ties: those which the reference itself cannot decide; adopted: those of
               them in which the engine's choice was another one, and was followed
    relaxed    tokens that are others than plain decode of the same engine has, as is declared of penalties in a round
    exercised  features of the case that really happened (see features.py)
    checked    how many records each rule looked at: a rule that looked at nothing proves nothing
    unseen     how many comparisons of a rule could not be made: what they look at ran in a CUDA graph, was drawn by a coin that
               is not recorded, or is a count that the release does not send
    impossible the requests that asked for what cannot be, each with the number of the output token from which on nothing of
               it could be judged: its grammar, its processor, its bias and its min_new_tokens together allow no token there
    unjudged   how many comparisons of a rule were left out for that
    shares     by request, how much of it was compared
    excused    how many differences were excused, by kind; excuses: the first MOST_EXCUSES of them
    without    rules that were switched off
    view       what a node of a draft tree was held to attend to, or a stored row to be, if that is not what is declared
    headroom   largest float error found among equal numbers, as a share of its bound
    not_seen   changed statements of a tree or a patch that did not run, of an equal case that ran some of them; "" if all ran
    effect     whether the change altered a recorded number of this case; "" without a change, or a base to compare with
    """

    status: Literal["equal", "diverged", "unknown"]
    rule: str = ""
    first: Divergence | None = None
    later: dict[str, int] = {}
    reason: str = ""
    vacuous: bool = False
    gap: str = ""
    undecided: bool = False
    choices: int = 0
    ties: int = 0
    adopted: int = 0
    relaxed: int = 0
    exercised: tuple[str, ...] = ()
    checked: dict[str, int] = {}
    unseen: dict[str, int] = {}
    impossible: dict[str, int] = {}
    unjudged: dict[str, int] = {}
    shares: dict[str, RequestShare] = {}
    excused: dict[str, int] = {}
    excuses: tuple[Excuse, ...] = ()
    without: tuple[str, ...] = ()
    view: str = ""
    headroom: float = 0.0
    not_seen: str = ""
    effect: str = ""
