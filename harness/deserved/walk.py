"""How many rounds a text takes: from M to M + a(M) + 1, until the text ends."""

from dataclasses import dataclass

from .follow import Followed


@dataclass(frozen=True, slots=True)
class Walk:
    """The rounds that an engine needs which computes as the reference does.

    starts    [R] M of each round, as the reference chooses
    accepted  [R] drafts accepted in each; the last round drafts past the end of the text, so its number is at most the true one
    fewest, most  rounds, as near ties go
    """

    starts: tuple[int, ...]
    accepted: tuple[int, ...]
    fewest: int
    most: int

    @property
    def rounds(self) -> int:
        """Rounds as the reference chooses."""
        return len(self.starts)

    def accepted_before(self, end: int) -> list[int]:
        """Drafts accepted in each round that begins in front of x[end]."""
        return [count for start, count in zip(self.starts, self.accepted, strict=True) if start < end]


def walk(followed: Followed, begin: int) -> Walk:
    """The rounds of a text whose token x[begin] was the first that an engine emitted. The prefill emits that one by itself."""
    last = len(followed.agrees) - 1
    starts, accepted, committed = [], [], begin
    while committed < last:
        starts.append(committed)
        accepted.append(min(followed.accepted(committed), last - committed - 1))
        committed += accepted[-1] + 1
    size = max(begin, last) + 1
    fewest, most = [0] * size, [0] * size
    for place in range(last - 1, begin - 1, -1):
        after = [min(place + count + 1, last) for count in followed.possible(place)]
        fewest[place] = 1 + min(fewest[next] for next in after)
        most[place] = 1 + max(most[next] for next in after)
    return Walk(tuple(starts), tuple(accepted), fewest[begin], most[begin])
