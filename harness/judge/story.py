"""What the trace says happened to one request, and what the reference says should have: the judge's two columns.

The engine's own choices (committed tokens, drafts) are followed, so that one wrong choice does not make everything after it
wrong too; rules.py decides whether each choice was right. Computed once per request: one target forward over the final
sequence and num_steps draft forwards serve every round (reference/chain.py, and the test that this equals the naive form).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagletwin.harness.case import Case
from eagletwin.harness.models.recipes import RECIPES
from eagletwin.harness.models.weights import model_pair
from eagletwin.harness.trace import Trace
from eagletwin.reference.chain import Chain, draft_chains
from eagletwin.reference.eagle import DraftRows
from eagletwin.reference.llama import TargetRows, target_rows


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
    """

    name: str
    prompt: tuple[int, ...]
    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)
    target: TargetRows | None = None
    draft: DraftRows | None = None
    chains: list[Chain] = field(default_factory=list)

    def token(self, index: int) -> int | None:
        """x[index], or None if it was never committed."""
        return self.tokens[index] if 0 <= index < len(self.tokens) else None


def stories(trace: Trace) -> dict[str, Story]:
    """The story of every request of the case, with the reference's rows filled in."""
    told = {request.id: _told(trace, request.id, request.prompt) for request in trace.header.case.requests}
    for story in told.values():
        _compute(trace.header.case, story)
    return told


def _told(trace: Trace, name: str, prompt: tuple[int, ...]) -> Story:
    story = Story(name, prompt, list(prompt))
    for number, record in enumerate(trace.header.records):
        if record.request != name:
            continue
        if record.stage == "prefill" and record.numbers["final"]:
            story.tokens = [*story.tokens[: record.numbers["end"]], int(trace.tensor(number, "next_token")[0])]
        elif record.stage == "draft":
            drafted = trace.tensor(number, "tokens")
            committed = len(story.tokens) - 1
            story.rounds.append(Round(committed, story.tokens[-1], [int(token) for token in drafted[1:]], committed))
        elif record.stage == "verify":
            story.tokens += [int(token) for token in trace.tensor(number, "predicted")]
            if story.rounds:
                story.rounds[-1].end = len(story.tokens) - 1
    return story


def _compute(case: Case, story: Story) -> None:
    recipe, pair = RECIPES[case.model], model_pair(case.model)
    # An id outside the vocabulary is a divergence that rules.py reports; here it only must not break the arithmetic.
    vocabulary = recipe.target.vocab_size
    limit = next(request for request in case.requests if request.id == story.name)
    most = len(limit.prompt) + limit.max_new_tokens + 2 * case.num_draft_tokens
    if len(story.tokens) > most:  # the reference's memory grows with the square of this
        raise ValueError(f"request {story.name} has {len(story.tokens)} committed tokens; it can have {most} at most")
    tokens = torch.tensor(story.tokens).clamp(0, vocabulary - 1)
    if len(tokens) < 2:
        return
    story.target = target_rows(pair.reference_target(), recipe.target, tokens[:-1])
    drafted = torch.tensor([round.drafted for round in story.rounds], dtype=torch.int64).reshape(-1, case.num_steps)
    story.draft, story.chains = draft_chains(
        pair.reference_head(recipe),
        tokens,
        story.target.hidden,
        [round.committed for round in story.rounds],
        drafted.clamp(0, vocabulary - 1),
    )


def rows_of(rows: TargetRows | DraftRows, positions: Tensor) -> Tensor:
    """Reference KV rows at positions [n], as one tensor a row: [n, 2, L, G, D]."""
    return torch.stack([rows.keys[:, positions], rows.values[:, positions]]).permute(2, 0, 1, 3, 4)


def stored_rows(keys: Tensor, values: Tensor) -> Tensor:
    """The engine's KV rows in the same shape: keys, values [L, n, G, D] -> [n, 2, L, G, D]."""
    return torch.stack([keys, values]).permute(2, 0, 1, 3, 4)
