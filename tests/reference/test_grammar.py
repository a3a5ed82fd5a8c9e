"""Earley's recognizer against Python's regular expressions, and against texts that are counted out by hand."""

import itertools
import re

import pytest

from eagletwin.harness.core.case import Grammar
from eagletwin.harness.core.grammar import rules_of
from eagletwin.reference.grammar import Automaton

TEXTS = ["".join(letters) for length in range(6) for letters in itertools.product("abc", repeat=length)]


@pytest.mark.parametrize("pattern", ["(ab|c)*a", "((a)*)*b?", "()", "(a|)(b+c)*", "a(b|c(a|b)+)?", "(a?b?)+c"])
def test_a_regular_expression_is_read_as_python_reads_it(pattern: str) -> None:
    automaton, sentences = (
        Automaton(rules_of(Grammar(rules=(pattern,)))),
        [text for text in TEXTS if re.fullmatch(pattern, text)],
    )
    assert [text for text in TEXTS if automaton.is_sentence(text)] == sentences
    short = [text for text in TEXTS if len(text) < 4]  # each of them that begins a sentence begins one of five letters
    assert [text for text in short if automaton.begins(text)] == [
        text for text in short if any(sentence.startswith(text) for sentence in sentences)
    ]


def test_what_no_regular_expression_says() -> None:
    automaton = Automaton(rules_of(Grammar(kind="ebnf", rules=("aAb|c",))))
    assert [text for text in TEXTS if automaton.is_sentence(text)] == ["c", "acb", "aacbb"]
    assert [text for text in ("", "aaa", "aac", "acb", "acbb", "ab") if automaton.begins(text)] == ["", "aaa", "aac", "acb"]


def test_rules_that_begin_with_themselves_and_rules_without_a_text() -> None:
    sums = Automaton(rules_of(Grammar(kind="ebnf", rules=("AbA|a",))))
    assert [text for text in TEXTS if sums.is_sentence(text)] == ["a", "aba", "ababa"]
    endless = Automaton(rules_of(Grammar(kind="ebnf", rules=("a|bB", "cB"))))
    assert [text for text in TEXTS if endless.begins(text)] == ["", "a"]


@pytest.mark.parametrize("pattern", ["abc(a|b)c", "ab?", "(ab)+", "c(ab|abc)a", "(a|b)cab", "()", "a(b|bc)", "(ab|ac)b"])
def test_what_must_follow_is_what_all_sentences_go_on_with(pattern: str) -> None:
    """By enumeration: what is common to all that follow a text in sentences of up to nine letters, up to where one ends."""
    automaton = Automaton(rules_of(Grammar(rules=(pattern,))))
    every = ("".join(letters) for length in range(10) for letters in itertools.product("abc", repeat=length))
    sentences = [text for text in every if re.fullmatch(pattern, text)]
    for text in (text for text in TEXTS[:121] if automaton.begins(text)):
        following = [sentence.removeprefix(text) for sentence in sentences if sentence.startswith(text)]
        common = itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*following, strict=False))
        assert automaton.forced(text) == "".join(letter for letter, *_ in common), text
