"""Requests of drawn cases rarely ask for what cannot be: a processor leaves their grammar a token."""

from collections import Counter
from math import inf

import numpy as np
import pytest

from eagletwin.cases.blocks import Asked, block_of
from eagletwin.harness.core.case import Grammar, Processor, Request
from eagletwin.harness.core.request_inputs import processed
from eagletwin.harness.judge.request_logits import first_impossible

# Text -> the token with which a tokenizer writes it, which is the one that llguidance allows where a text goes on in one way.
WRITTEN = {"a": 0, "b": 1, "c": 2, "d": 3, "ab": 4, "ba": 5, "cd": 6}


def _needed(grammar: Grammar) -> list[int]:
    letters = {letter for rule in grammar.rules for letter in rule}
    return [token for text, token in WRITTEN.items() if letters.issuperset(text)]


def _drawn(backend: str, blocks: int = 16) -> list[Request]:
    """Requests with a grammar and a processor that forbids tokens."""
    asked = Asked(held={"grammar_backend": backend}, asks=("processor", "grammar"))
    requests = [one for number in range(blocks) for case in block_of(7, number, asked).cases() for one in case.requests]
    return [one for one in requests if one.grammar is not None and one.processor is not None and one.processor.kind == "forbid"]


def test_no_processor_forbids_the_one_token_that_llguidance_may_allow() -> None:
    drawn, forbidding = _drawn("llguidance"), Counter[int]()
    assert len(drawn) > 40
    for request in drawn:
        assert request.grammar is not None
        assert request.processor is not None
        more = processed(request.processor, 96)
        assert not [token for token in _needed(request.grammar) if more[token] == -inf], request
        forbidding[request.processor.seed] += sum(number == -inf for number in more)
    assert len(forbidding) > 4, "they are not all the same one"
    assert all(forbidding.values()), "each forbids something"


@pytest.mark.long
def test_with_xgrammar_any_processor_is_drawn() -> None:
    """A text has some twelve tokens there, and a processor forbids a quarter of all."""
    assert {one.processor.seed for one in _drawn("xgrammar", 40) if one.processor is not None} == set(range(16))


def test_the_first_row_in_which_nothing_is_allowed() -> None:
    request = Request(id="a", prompt=(1, 2), max_new_tokens=4, processor=Processor())
    logits = np.zeros((5, 3))
    logits[3:] = -inf
    assert first_impossible(request, logits) == 3
    logits[2:4, 1] = 0.0
    assert first_impossible(request, logits) == 4
    logits[0], logits[4, 2] = -inf, 0.0
    assert first_impossible(request, logits) is None, "row 0 is the prompt's first, behind which no token is given"
