"""What the trace says happened to one request, and what the reference says should have: the judge's two columns.

The engine's own choices (committed tokens, drafts) are followed, so that one wrong choice does not make everything after it
wrong too; rules.py decides whether each choice was right. Computed once: one target forward over the final sequences and
num_steps draft forwards serve every round of every request (reference/chain.py, and the test that this equals the naive form).
"""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from eagletwin.harness.case import Case
from eagletwin.harness.models.recipes import RECIPES
from eagletwin.harness.models.weights import model_pair
from eagletwin.harness.trace import Trace
from eagletwin.reference.chain import Chain, draft_chains
from eagletwin.reference.eagle import DraftRows, Head
from eagletwin.reference.llama import TargetRows, Weights, target_rows

# Committed tokens of the requests that share a forward: its cost grows with the square, and that of many small ones with
# their number.
_TOGETHER = 256


@dataclass(slots=True)
class Round:
    """One verify round: committed is M when it began, drafted d[1..S], end is M when it was over (M if never verified)."""

    committed: int
    bonus: int
    drafted: list[int]
    end: int


@dataclass(slots=True)
class Story:
    """One request.

    tokens   [T] everything committed by the end, prompt first; x[T-1] is the last bonus token
    rounds   by verify ordinal
    target   rows 0..T-2 of the reference; draft: rows 0..T-2; chains: one per round
    stored   KV rows 0..T-2 of the reference, of "target" and "draft" [T-1, 2, L, G, D]
    """

    name: str
    prompt: tuple[int, ...]
    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)
    target: TargetRows | None = None
    draft: DraftRows | None = None
    chains: list[Chain] = field(default_factory=list)
    stored: dict[str, Tensor] = field(default_factory=dict)

    def token(self, index: int) -> int | None:
        """x[index], or None if it was never committed."""
        return self.tokens[index] if 0 <= index < len(self.tokens) else None


def stories(trace: Trace) -> dict[str, Story]:
    """The story of every request of the case, with the reference's rows filled in."""
    case = trace.header.case
    told = _told(trace)
    for request in case.requests:
        story = told[request.id]
        most = len(request.prompt) + request.max_new_tokens + 2 * case.num_draft_tokens
        if len(story.tokens) > most:  # the reference's memory grows with the square of this
            raise ValueError(f"request {request.id} has {len(story.tokens)} committed tokens; it can have {most} at most")
    pack: list[Story] = []
    for story in told.values():
        if len(story.tokens) < 2:
            continue
        if pack and sum(len(other.tokens) for other in (*pack, story)) > _TOGETHER:
            _compute(case, pack)
            pack = []
        pack.append(story)
    if pack:
        _compute(case, pack)
    return told


def _told(trace: Trace) -> dict[str, Story]:
    told = {request.id: Story(request.id, request.prompt, list(request.prompt)) for request in trace.header.case.requests}
    consumed: dict[tuple[str, int], list[int]] = {}  # (request, round) -> what its draft decode steps consumed
    for number, record in enumerate(trace.header.records):
        story = told.get(record.request)
        if story is None:
            continue
        if record.stage == "prefill" and record.numbers["final"]:
            story.tokens = [*story.tokens[: record.numbers["end"]], int(trace.tensor(number, "next_token")[0])]
        elif record.stage == "draft":
            drafted, committed = trace.integers(number, "tokens")[1:], len(story.tokens) - 1
            story.rounds.append(Round(committed, story.tokens[-1], drafted, committed))
        elif record.stage == "draft.decode":
            consumed.setdefault((record.request, record.round), []).extend(trace.integers(number, "input_ids"))
        elif record.stage == "verify":
            story.tokens += trace.integers(number, "predicted")
            if story.rounds:
                story.rounds[-1].end = len(story.tokens) - 1
    for (request, round), drafted in consumed.items():
        story = told[request]
        if round == len(story.rounds):  # draft() never returned: its last round drafted what is known, and zeros
            committed = len(story.tokens) - 1
            drafted += [0] * (trace.header.case.num_steps - len(drafted))
            story.rounds.append(Round(committed, story.tokens[-1], drafted, committed))
    return told


@lru_cache(maxsize=8)
def _reference(model: str) -> tuple[Weights, Head]:
    """The recipe's target and head in float64."""
    pair = model_pair(model)
    return pair.reference_target(), pair.reference_head(RECIPES[model])


def _compute(case: Case, pack: list[Story]) -> None:
    """Fill the reference's rows in, of all these requests in the same forwards."""
    shape, (weights, head) = RECIPES[case.model].target, _reference(case.model)
    # An id outside the vocabulary is a divergence that rules.py reports; here it only must not break the arithmetic.
    tokens = [torch.tensor(story.tokens).clamp(0, shape.vocab_size - 1) for story in pack]
    lengths = [len(sequence) - 1 for sequence in tokens]
    target = target_rows(weights, shape, torch.cat([sequence[:-1] for sequence in tokens]), lengths)
    rounds = [(n, round.committed) for n, story in enumerate(pack) for round in story.rounds]
    drafted = torch.tensor([round.drafted for story in pack for round in story.rounds], dtype=torch.int64)
    drafted = drafted.reshape(-1, case.num_steps).clamp(0, shape.vocab_size - 1)
    draft, chains = draft_chains(head, tokens, target.hidden, rounds, drafted)
    stored = {"target": stored_rows(target.keys, target.values), "draft": stored_rows(draft.keys, draft.values)}
    begin, first = 0, 0
    for story, length in zip(pack, lengths, strict=True):
        mine = slice(begin, begin + length)
        story.target = TargetRows(
            target.hidden[mine], target.residual[mine], target.logits[mine], target.keys[:, mine], target.values[:, mine]
        )
        story.draft = DraftRows(draft.hidden[mine], draft.logits[mine], draft.keys[:, mine], draft.values[:, mine])
        story.stored = {part: rows[mine] for part, rows in stored.items()}
        story.chains = chains[first : first + len(story.rounds)]
        begin, first = mine.stop, first + len(story.rounds)


def stored_rows(keys: Tensor, values: Tensor) -> Tensor:
    """KV rows as one tensor a row: keys, values [L, n, G, D] -> [n, 2, L, G, D]."""
    return torch.stack([keys, values]).permute(2, 0, 1, 3, 4)
