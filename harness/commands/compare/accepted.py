"""Tokens that a round commits on each side, by model and by chain or tree: a change that costs acceptance breaks no output."""

from dataclasses import dataclass

from eagletwin.harness.core.records import Header

from .questions import Question


@dataclass(slots=True)
class RoundsOfBoth:
    """One configuration: the generated cases that ran on both sides, to their end. rounds, tokens: (BASE, HEAD)."""

    model: str
    shape: str
    cases: int = 0
    rounds: tuple[int, int] = (0, 0)
    tokens: tuple[int, int] = (0, 0)

    @property
    def means(self) -> tuple[float, float] | None:
        """Mean accept length on BASE and on HEAD, the bonus token counted; None: a side had no round."""
        if 0 in self.rounds:
            return None
        return self.tokens[0] / self.rounds[0], self.tokens[1] / self.rounds[1]

    @property
    def text(self) -> tuple[str, str, str]:
        """BASE, HEAD, and what became of it."""
        means = self.means
        if means is None:
            return "no round", "no round", ""
        change = (means[1] - means[0]) / means[0]
        said = "same" if self.rounds == self.rounds[::-1] and self.tokens == self.tokens[::-1] else f"{change:+.1%}"
        return f"{means[0]:.3f}", f"{means[1]:.3f}", said

    @property
    def fell(self) -> bool:
        means = self.means
        return means is not None and means[1] < means[0]


def count_rounds(found: dict[tuple[str, str], RoundsOfBoth], question: Question, base: Header, head: tuple[int, int]) -> None:
    """Add a generated case, unless a side did not finish it. head: rounds and tokens of HEAD; none if it did not."""
    if base.ending.kind != "finished" or not head[0]:
        return
    key = question.case.model, question.shape
    one = found.setdefault(key, RoundsOfBoth(*key))
    lengths = [record.numbers["accept_len"] for record in base.records if record.stage == "verify"]
    one.cases += 1
    one.rounds = one.rounds[0] + len(lengths), one.rounds[1] + head[0]
    one.tokens = one.tokens[0] + sum(lengths), one.tokens[1] + head[1]
