"""What a request's grammar allows (reference/grammar.py), by the tokens that were sent before."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Grammar
from eagletwin.harness.core.grammar import WORDS, kind, rules_of, word
from eagletwin.reference.grammar import Automaton


@lru_cache(maxsize=256)
def _automaton(grammar: Grammar) -> Automaton:
    return Automaton(rules_of(grammar))


def text_of(grammar: Grammar, sent: Sequence[int]) -> str | None:
    """What was sent, as a text; None if it is none that the grammar knows, or the text is over."""
    text = "".join(word(token) for token in sent)
    return text if all(map(word, sent)) and _automaton(grammar).begins(text) else None


def allowed(grammar: Grammar, text: str, vocabulary: int) -> Array:
    """Which tokens may come after a text [V]: those that go on with it, and those that end it where it is whole."""
    automaton = _automaton(grammar)
    kinds = [automaton.begins(text + own) if own else automaton.is_sentence(text) for own in WORDS]
    found: Array = np.array([kinds[kind(token)] for token in range(vocabulary)])
    return found


def end_of(grammar: Grammar, tokens: Sequence[int]) -> int | None:
    """Where the token stands that ends the text, by the grammar; None if none does."""
    at = next((n for n, token in enumerate(tokens) if not word(token)), None)
    text = None if at is None else text_of(grammar, tokens[:at])
    return at if text is not None and _automaton(grammar).is_sentence(text) else None


def constrained_rows(tokens: Sequence[int], first: int, grammar: Grammar, logits: Array) -> Array:
    """logits [n, V] of rows first, first + 1, .., of which `first` is the prompt's last: of tokens that may not come, -inf.
    Behind the end of the text, or what is no beginning of one, everything may."""
    rows: Array = logits.copy()
    for n, own in enumerate(rows):
        text = text_of(grammar, tokens[first + 1 : first + 1 + n])
        if text is None:
            break
        own[~allowed(grammar, text, len(own))] = -np.inf
    return rows
