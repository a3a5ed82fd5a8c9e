"""The target's logits as a request wants them changed: by its penalties, its bias, its processor and its grammar."""

from collections.abc import Mapping, Sequence

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.logits import added
from eagletwin.harness.families import RECIPES

from .constraints import constrained_rows
from .penalties import penalized_rows


def asked_logits(case: Case, request: Request, tokens: Sequence[int], began: Mapping[int, int], logits: Array) -> Array | None:
    """logits [n, V] of the rows of a request with these tokens, of which those from the prompt's last on are changed; None: the
    request wants nothing changed.

    began  of a row of a round the row that the round began with: what was sent before that counts for its penalties; empty: a
           row counts all that was sent before it, as one token at a time is decoded
    """
    more = added(request, logits.shape[-1])
    if more is None and not request.penalized and request.grammar is None:
        return None
    first = len(request.prompt) - 1
    sent = logits[first:]
    if request.penalized:
        sent = penalized_rows(request, RECIPES[case.model].end_of_sequence, tokens, began, sent)
    sent = sent if more is None else sent + np.array(more)
    if request.grammar is not None:
        sent = constrained_rows(tokens, first, request.grammar, case.engine.sglang.grammar_backend, sent)
    changed: Array = np.concatenate([logits[:first], sent])
    return changed


def first_impossible(request: Request, logits: Array) -> int | None:
    """The first row, from the prompt's last on, of changed logits [n, V] in which no token is allowed; None: there is none.

    What a request asks for together may be impossible: a grammar allows one token, and a processor forbids it. No token is
    right there. SGLang gives one nevertheless, and aborts the request if its grammar refuses it.
    """
    first = len(request.prompt) - 1
    nothing = np.flatnonzero(np.isneginf(logits[first:]).all(-1))
    return first + int(nothing[0]) if nothing.size else None


def before_additions(request: Request, row: Array) -> Array:
    """A changed row of logits [V] without what the request's bias and processor add to it. -> [V]

    The error of a computed logit is a share of the row's largest. An addition is rounded once and makes no other logit less
    certain, also where it is -100. A token that the processor forbids keeps its -inf.
    """
    more = np.array(added(request, len(row)) or [0.0] * len(row))
    before: Array = np.where(np.isfinite(more), row - np.where(np.isfinite(more), more, 0), row)
    return before
