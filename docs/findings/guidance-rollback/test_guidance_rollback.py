"""With llguidance a mask does not depend on tokens that were rolled back."""

import unittest

from sglang.srt.constrained.llguidance_backend import (
    GuidanceGrammar,
    LLTokenizer,
    grammar_from,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

# Lexemes of one letter, and tokens that write two of them.
GRAMMAR = """
root ::= "a" root | "c" ("a" | "b") "b" | "d" ("a" | "b") "a"
"""
TOKENS = [b"a", b"b", b"c", b"d", b"ab", b"ba", b""]
A, B, C, D, AB, BA, END = range(len(TOKENS))


class _Letters:
    """The part of a tokenizer that llguidance uses."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id = END, None
    tokens, special_token_ids = TOKENS, []

    def __call__(self, text):
        return [TOKENS.index(letter.encode()) for letter in text]


class TestGuidanceRollback(unittest.TestCase):
    def new(self):
        tokenizer = LLTokenizer(_Letters(), eos_token=END)
        return GuidanceGrammar(tokenizer, grammar_from("ebnf", GRAMMAR))

    def allowed(self, grammar):
        mask = grammar.allocate_vocab_mask(len(TOKENS), 1, "cpu")
        grammar.fill_vocab_mask(mask, 0)
        return [token for token in range(len(TOKENS)) if int(mask[0, 0]) >> token & 1]

    def test_siblings(self):
        for first, second, expected in (
            (D, C, [A, B, AB]),
            (C, D, [A, B, BA]),
        ):
            grammar = self.new()
            grammar.accept_token(first)
            self.allowed(grammar)
            grammar.rollback(1)
            grammar.accept_token(second)
            self.assertEqual(self.allowed(grammar), expected)

    def test_as_if_nothing_had_been_taken_back(self):
        grammar = self.new()
        grammar.accept_token(C)
        self.assertEqual(self.allowed(grammar), [A, B, AB])


if __name__ == "__main__":
    unittest.main()
