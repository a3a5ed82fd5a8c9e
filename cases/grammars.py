"""Small grammars of drawn cases, each of which some answer fits: regular expressions, and rules that refer to each other.

Simplest comes first: a grammar shrinks to a single letter. A reference comes behind a letter, so that no rule begins with
itself, and in no rule's first alternative, so that each has a text that ends. In rules, nothing is repeated that may be empty.
"""

from hypothesis import strategies as st

from eagletwin.harness.core.case import Grammar

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


@st.composite
def grammars(draw: st.DrawFn) -> Grammar:
    if draw(st.booleans()):
        names = _RULES[: draw(st.integers(1, 3))]
        rules = [_rule(draw, names) for _ in names]
        if draw(st.integers(1, _TWINS)) == _TWINS:
            rules[0] += f"|{_twins(draw)}"
        return Grammar(kind="ebnf", rules=tuple(rules))
    return Grammar(rules=(_text(draw, _DEEP),))
