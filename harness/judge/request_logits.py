"""What requests do to their logits: penalties, biases, processors and grammars."""

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Case, Grammar, GrammarBackend, Penalties, Request, logit_changes
from eagletwin.harness.core.grammar import WORDS, kind, rules_of, tokenize_letters, word
from eagletwin.harness.families import RECIPES
from eagletwin.reference.grammar import Automaton
from eagletwin.reference.sampling import apply_penalties, held_back

# A request's logits with its penalties on tokens that it was sent before, and its min_new_tokens (reference/sampling.py), one
# row each.
#
# All rows of a round are penalized by what was sent when it began: the engine says of its penalties in verify that they are a
# relaxed version of penalties. A row of a prefill, which gives one token, is penalized by all that was sent before that token.


def penalized_rows(
    request: Request, ends: int, tokens: Sequence[int], began: Mapping[int, int], logits: Array, *, strict: bool = False
) -> Array:
    """logits [n, V] of the rows from the prompt's last on. ends: the end-of-sequence token, which min_new_tokens holds back as
    it does the request's own. began: of a row of a round the row that the round began with. strict: as in EngineView."""
    first, penalties, rows = len(request.prompt) - 1, request.penalties or Penalties(), []
    for row, own in enumerate(torch.from_numpy(logits), first):
        before = tokens[first + 1 : began.get(row, row) + 1]
        sent = [token for token in before if 0 <= token < len(own)]
        prompt = request.prompt if strict else None
        changed = apply_penalties(own, sent, penalties.frequency, penalties.presence, penalties.repetition, prompt)
        stops = [token for token in {*request.stop, ends} if token < len(own)]
        rows.append(held_back(changed, len(before), request.min_new_tokens, stops))
    found: Array = torch.stack(rows).numpy() if rows else logits
    return found


# What a request's grammar allows (reference/grammar.py), by the tokens that were sent before.
#
# xgrammar allows each token that goes on with the text. So does llguidance, but where all texts go on with the same letters:
# there it allows the one token with which a tokenizer writes these, by its own documentation of fast-forward tokens. Their last
# ones are free where a token could write them together with what may follow.

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


def allowed_tokens(grammar: Grammar, text: str, vocabulary: int, backend: GrammarBackend) -> Array:
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
    letters = automaton.forced_text(text)
    tokens = tokenize_letters(letters)
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
        own[~allowed_tokens(grammar, text, len(own), backend)] = -np.inf
    return rows


# The target's logits as a request wants them changed: by its penalties, its bias, its processor and its grammar.


def apply_request_logit_changes(
    case: Case, request: Request, tokens: Sequence[int], began: Mapping[int, int], logits: Array, *, strict: bool = False
) -> Array | None:
    """logits [n, V] of the rows of a request with these tokens, of which those from the prompt's last on are changed; None: the
    request wants nothing changed.

    began  of a row of a round the row that the round began with: what was sent before that counts for its penalties; empty: a
           row counts all that was sent before it, as one token at a time is decoded
    strict  as in EngineView
    """
    more = logit_changes(request, logits.shape[-1])
    if more is None and not request.penalized and request.grammar is None:
        return None
    first = len(request.prompt) - 1
    sent, added = logits[first:], 0.0 if more is None else np.array(more)
    sent = sent + added if strict else sent
    if request.penalized:
        began = {} if strict else began
        sent = penalized_rows(request, RECIPES[case.model].end_of_sequence, tokens, began, sent, strict=strict)
    sent = sent if strict else sent + added
    if request.grammar is not None:
        sent = constrained_rows(tokens, first, request.grammar, case.engine.sglang.grammar_backend, sent)
    changed: Array = np.concatenate([logits[:first], sent])
    return changed


def first_impossible(request: Request, logits: Array) -> int | None:
    """The first row, from the prompt's last on, of changed logits [n, V] in which no token is allowed; None: there is none.

    What a request asks for together may be impossible: a grammar allows one token, and a processor forbids it. No token is
    right there. The engine gives one nevertheless, and aborts the request if its grammar refuses it.
    """
    first = len(request.prompt) - 1
    nothing = np.flatnonzero(np.isneginf(logits[first:]).all(-1))
    return first + int(nothing[0]) if nothing.size else None


def before_additions(request: Request, row: Array) -> Array:
    """A changed row of logits [V] without what the request's bias and processor add to it. -> [V]

    The error of a computed logit is a share of the row's largest. An addition is rounded once and makes no other logit less
    certain, also where it is -100. A token that the processor forbids keeps its -inf.
    """
    more = np.array(logit_changes(request, len(row)) or [0.0] * len(row))
    before: Array = np.where(np.isfinite(more), row - np.where(np.isfinite(more), more, 0), row)
    return before
