"""Greedy verification of a chain, and what it commits.

The target consumes the bonus token and the drafts: node 0 is x[M], node j is d[j]. The rule (EAGLE, speculative sampling at
temperature 0): walk from node 0; go on to the next node while its token is the target's argmax at the node before; the
argmax at the last accepted node is the new bonus token.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """accept_len counts the bonus token, as SGLang's `accept_lens` does; committed holds the accept_len new tokens."""

    accept_len: int
    committed: tuple[int, ...]


def verify_inputs(bonus: int, drafted: Sequence[int]) -> list[int]:
    """Tokens that the target consumes at positions M..M+S: x[M], d[1..S]."""
    return [bonus, *drafted]


def verify_greedy(drafted: Sequence[int], argmax: Sequence[int]) -> Verdict:
    """drafted d[1..S]; argmax[j] is the target's choice after consuming node j (at least up to the first rejection).

    Commits argmax[0..a] where a is the number of drafts accepted; accept_len = a + 1.
    """
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == argmax[accepted]:
        accepted += 1
    return Verdict(accepted + 1, tuple(argmax[: accepted + 1]))
