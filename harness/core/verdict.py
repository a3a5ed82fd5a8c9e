"""What the judge says: a verdict, and each divergence as something that can be argued about.

A verdict is `equal`, `diverged` or `unknown`; unknown is never a pass. judge/rules/ declares everything that is checked.
"""

from typing import Literal

from msgspec import Struct

# What a node of a draft tree attends to (reference/growth.py); what a stored row of a multi-layer draft is (reference/mtp.py);
# `shifted`: a plain language model is held to what it computes of x[1..] at positions 0.. (reference/draft_heads.py).
View = Literal["slot_layout", "true_tree", "last_fed", "committed", "shifted"]

# As declared. Every release so far stores a branch's keys by its number (PR #8409, never merged): ledger entry 8409 shows it.
# And leaves rows that were fed a rejected draft as they are, but for hybrid models: entry boundary-kv shows it.
DECLARED_VIEW: View = "slot_layout"


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
