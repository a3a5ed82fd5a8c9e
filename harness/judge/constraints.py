"""What a request's grammar allows (reference/grammar.py), by the tokens that were sent before.

xgrammar allows each token that goes on with the text. So does llguidance, but where all texts go on with the same letters:
there it allows the one token with which a tokenizer writes these, by its own documentation of fast-forward tokens. Their last
ones are free where a token could write them together with what may follow.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Grammar, GrammarBackend
from eagletwin.harness.core.grammar import WORDS, kind, rules_of, spelled, word
from eagletwin.reference.grammar import Automaton

_LONGEST = max(map(len, WORDS))


@lru_cache(maxsize=256)
def _automaton(grammar: Grammar) -> Automaton:
    return Automaton(rules_of(grammar))


def text_of(grammar: Grammar, sent: Sequence[int], backend: GrammarBackend) -> str | None:
    """What was sent, as a text; None if it is none that the grammar knows, or the text is over, or the backend does not allow
    it to be written so."""
    words = [word(token) for token in sent]
    text = "".join(words)
    if not all(words) or not _automaton(grammar).begins(text):
        return None
    if backend == "llguidance":
        before = itertools.accumulate(words, initial="")
        if any(_only(grammar, own) not in (None, token) for own, token in zip(before, sent, strict=False)):
            return None
    return text


def allowed(grammar: Grammar, text: str, vocabulary: int, backend: GrammarBackend) -> Array:
    """Which tokens may come after a text [V]: those that go on with it, and those that end it where it is whole."""
    only = _only(grammar, text) if backend == "llguidance" else None
    if only is not None:
        found: Array = np.arange(vocabulary) == only
        return found
    automaton = _automaton(grammar)
    kinds = [automaton.begins(text + own) if own else automaton.is_sentence(text) for own in WORDS]
    return np.array([kinds[kind(token)] for token in range(vocabulary)])


@lru_cache(maxsize=1 << 14)
def _only(grammar: Grammar, text: str) -> int | None:
    """The token with which a tokenizer writes what must follow a text; None: more than one letter may follow, or the first
    token depends on what comes then."""
    automaton = _automaton(grammar)
    letters = automaton.forced(text)
    tokens = spelled(letters)
    for own in range(max(0, len(letters) - _LONGEST), len(letters)):
        before, rest = text + letters[:own], letters[own:]
        if any(longer.startswith(rest) and longer != rest and automaton.begins(before + longer) for longer in WORDS):
            while tokens and len("".join(map(word, tokens))) > own:
                tokens.pop()
            break
    return tokens[0] if tokens else None


def end_of(grammar: Grammar, tokens: Sequence[int]) -> int | None:
    """Where the token stands that ends the text, by the grammar, however it is written; None if none does."""
    at = next((n for n, token in enumerate(tokens) if not word(token)), None)
    text = None if at is None else text_of(grammar, tokens[:at], "xgrammar")
    return at if text is not None and _automaton(grammar).is_sentence(text) else None


def constrained_rows(tokens: Sequence[int], first: int, grammar: Grammar, backend: GrammarBackend, logits: Array) -> Array:
    """logits [n, V] of rows first, first + 1, .., of which `first` is the prompt's last: of tokens that may not come, -inf.
    Behind the end of the text, or what is no beginning of one, everything may."""
    rows: Array = logits.copy()
    for n, own in enumerate(rows):
        text = text_of(grammar, tokens[first + 1 : first + 1 + n], backend)
        if text is None:
            break
        own[~allowed(grammar, text, len(own), backend)] = -np.inf
    return rows
