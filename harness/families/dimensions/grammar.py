"""Requests that are kept to a grammar, and what SGLang keeps them with.

Drawn grammars are small, and some answer fits each. Simplest comes first: a grammar shrinks to a single letter. A reference
comes behind a letter, so that no rule begins with itself, and in no rule's first alternative, so that each has a text that
ends. In rules, nothing is repeated that may be empty.
"""

from collections.abc import Iterator
from math import isfinite
from typing import get_args

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Grammar, GrammarBackend, Request, processor_bias
from eagletwin.harness.core.grammar import aborted_unread, rules_of, writes
from eagletwin.reference.grammar import left_recursive, reaching

from .dimension import Refusal, of_requests, of_settings, st
from .logit_bias import SEEDS

_LETTERS, _RULES = "abcd", "ABC"
_DEEP = 3
_TWINS = 2  # one grammar of rules in so many has twins


def _letters(draw: st.DrawFn) -> str:
    some = draw(st.lists(st.sampled_from(_LETTERS), min_size=1, max_size=4, unique=True))
    return some[0] if len(some) == 1 else f"({'|'.join(some)})"


def _text(draw: st.DrawFn, depth: int, *, nested: bool = True) -> str:
    """nested: whether what is repeated may have repetitions in it."""
    kind = draw(st.integers(0, 5)) if depth else 0
    if kind == 0:
        return _letters(draw)
    first = _text(draw, depth - 1 if nested or kind < 3 else 0, nested=nested)
    if kind == 1:
        return first + _text(draw, depth - 1, nested=nested)
    if kind == 2:
        return f"({first}|{_text(draw, depth - 1, nested=nested)})"
    return f"({first}){'*+?'[kind - 3]}"


def _rule(draw: st.DrawFn, rules: str) -> str:
    alternatives = [_text(draw, _DEEP - 1, nested=False)]
    for _ in range(draw(st.integers(1, 2))):
        around = [draw(st.sampled_from(_LETTERS)), draw(st.sampled_from(rules))]
        behind = draw(st.integers(0, 3))
        around += [_text(draw, 1, nested=False)] if behind else []
        around += [draw(st.sampled_from(_LETTERS)), draw(st.sampled_from(rules))] if behind == 3 else []
        alternatives.append("".join(around))
    return "|".join(alternatives)


def _twins(draw: st.DrawFn) -> str:
    """Two alternatives of one shape whose ends tell them apart: where one was taken back, the other is not the same."""
    first, second = draw(st.lists(st.sampled_from(_LETTERS), min_size=2, max_size=2, unique=True))
    ends = draw(st.lists(st.sampled_from(_LETTERS), min_size=2, max_size=2, unique=True))
    between = _letters(draw)
    return f"{first}{between}{ends[0]}|{second}{between}{ends[1]}"


def _grammar(draw: st.DrawFn) -> Grammar:
    if draw(st.booleans()):
        names = _RULES[: draw(st.integers(1, 3))]
        rules = [_rule(draw, names) for _ in names]
        if draw(st.integers(1, _TWINS)) == _TWINS:
            rules[0] += f"|{_twins(draw)}"
        return Grammar(kind="ebnf", rules=tuple(rules))
    return Grammar(rules=(_text(draw, _DEEP),))


def grammars() -> "st.SearchStrategy[Grammar]":
    return st.composite(_grammar)()


def _draw(draw: st.DrawFn, _request: Request, _vocabulary: int) -> Grammar | None:
    wanted = draw(grammars())
    return wanted if draw(st.integers(0, 3)) else None


def _settle(case: Case, request: Request, vocabulary: int) -> Request:
    """Without a grammar that is never read, and with a processor that leaves a grammar a token.

    Where llguidance allows one token alone, a processor that forbids it leaves none: nothing can be judged from there on.
    xgrammar allows all tokens of a text, and a processor a part of them. min_new_tokens may forbid the same token, as a stop
    token. It rarely does, and such a request stays as it is.
    """
    if aborted_unread(case, request):
        request = replace(request, grammar=None)
    own, guided = request.processor, case.engine.sglang.grammar_backend == "llguidance"
    if own is None or own.kind != "forbid" or request.grammar is None or not guided:
        return request
    needed = writes(request.grammar)
    for further in range(SEEDS):
        processor = replace(own, seed=(own.seed + further) % SEEDS)
        more = processor_bias(processor, vocabulary)
        if all(isfinite(more[token]) for token in needed):
            return replace(request, processor=processor)
    raise ValueError(f"each of {SEEDS} processors forbids one of the tokens {needed}")


def _refusals(case: Case, request: Request) -> Iterator[Refusal]:
    """What eagletwin cannot read, what nothing can be answered with, and what the backend does not read right."""
    grammar = request.grammar
    if grammar is None:
        return
    if aborted_unread(case, request):
        yield (
            ": grammar: the request is aborted before it is read; SGLang then runs another prompt in its place",
            "abort it in a later iteration, which is in no pause",
        )
    try:
        rules = rules_of(grammar)
    except ValueError as error:
        yield f": grammar: {error}", "docs/reference/case.md says what a rule is"
        return
    if grammar.kind == "regex" and (len(grammar.rules) > 1 or any(letter.isupper() for letter in grammar.rules[0])):
        yield ": grammar: a regular expression with rules to refer to", "make it one rule without capitals, or an ebnf"
    if len(reaching(rules, letters=True)) < len(rules):
        yield ": grammar: a rule has no text that ends", "give it an alternative that does not need the rule itself"
    if grammar.kind == "ebnf" and left_recursive(rules):
        yield (
            ": grammar: a rule begins with itself, which xgrammar 0.2.8 does not read right",
            "let it end with itself instead",
        )


def _smaller(grammar: Grammar | None) -> Iterator[Grammar]:
    """Without one rule, or without one sign of one: check_case says which of them are grammars still."""
    if grammar is None:
        return
    for kept in range(1, len(grammar.rules)):
        yield replace(grammar, rules=grammar.rules[:kept])
    for number, rule in enumerate(grammar.rules):
        for first in range(len(rule)):
            for last in (len(rule), first + 3, first + 2, first + 1):
                if less := rule[:first] + rule[last:]:
                    yield replace(grammar, rules=(*grammar.rules[:number], less, *grammar.rules[number + 1 :]))


def _alone(request: Request) -> bool:
    """Whether a grammar is all that changes its logits."""
    return request.grammar is not None and not (request.penalized or request.logit_bias or request.processor)


def _by_another(case: Case) -> bool:
    return case.constrains and case.engine.sglang.grammar_backend != get_args(GrammarBackend)[0]


GRAMMAR = of_requests(
    "grammar",
    "grammars",
    key="grammar",
    size=lambda grammar: sum(map(len, grammar.rules)),
    smaller=_smaller,
    example=Grammar(rules=("a*",)),
    draw=_draw,
    settle=_settle,
    refuses=_refusals,
    modes={"pp": "not driven", "dp": "not tried"},
    kind=True,
    kinds={"mixed_grammar": lambda case: case.constrains and case.engine.sglang.mixed_chunks},
    happened={
        "constrained": (
            "a grammar made another token the target's best, where verify committed one",
            lambda run: any(_alone(run.requests[one.request]) and run.logits_changed(one) for one in run.verified),
        ),
        "grammar_refuses": (
            "a draft token did not go on with the text of a request with a grammar, and its parent did",
            lambda run: any(map(run.refused, run.verified)),
        ),
        "grammar_ends_in_tree": (
            "a draft token ended the text of a request with a grammar",
            lambda run: any(map(run.ends_in_tree, run.verified)),
        ),
        "grammar_ends_in_path": (
            "an accepted draft token ended the text of a request with a grammar, and verify committed more",
            lambda run: any(map(run.ends_in_path, run.verified)),
        ),
    },
)
BACKEND = of_settings(
    "grammar_backend",
    "grammar backend",
    key="llguidance",
    has=_by_another,
    modes={"pp": "not driven", "dp": "not tried"},
    kinds={"grammar_of_llguidance": _by_another},
)
DIMENSIONS = (GRAMMAR, BACKEND)
