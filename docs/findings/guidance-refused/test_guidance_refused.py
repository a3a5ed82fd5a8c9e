"""llguidance's grammar is unchanged after it rejects a token, as xgrammar's is."""

import unittest

from sglang.srt.constrained.llguidance_backend import (
    GuidanceGrammar,
    LLTokenizer,
    allocate_token_bitmask,
    grammar_from,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


class TestGuidanceRefused(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tokenizer = LLTokenizer("byte")

    def read(self, regex, text):
        grammar = GuidanceGrammar(self.tokenizer, grammar_from("regex", regex))
        for byte in text:
            grammar.accept_token(byte)
        return grammar

    def allowed(self, grammar):
        """Return the tokens of the next mask, or None if it raises."""
        mask = allocate_token_bitmask(1, self.tokenizer.vocab_size)
        try:
            grammar.fill_vocab_mask(mask, 0)
        except ValueError:
            return None
        return {
            token
            for token in range(self.tokenizer.vocab_size)
            if int(mask[0, token // 32]) >> token % 32 & 1
        }

    def test_the_next_mask_is_that_of_the_text_so_far(self):
        grammar = self.read("(a|b)(c|d)(a|b)", b"a")
        with self.assertRaises(ValueError):
            grammar.accept_token(ord("x"))
        self.assertEqual(self.allowed(grammar), set(b"cd"))

    def test_and_where_the_text_is_over(self):
        grammar = self.read("(a|b)", b"a")
        with self.assertRaises(ValueError):
            grammar.accept_token(ord("b"))
        self.assertEqual(self.allowed(grammar), {self.tokenizer.eos_token})
        grammar.accept_token(self.tokenizer.eos_token)
        self.assertTrue(grammar.is_terminated())

    def test_a_text_that_is_allowed_is_read_and_taken_back(self):
        grammar = self.read("(a|b)(c|d)(a|b)", b"ac")
        grammar.rollback(1)
        self.assertEqual(self.allowed(grammar), set(b"cd"))
        for byte in b"db":
            grammar.accept_token(byte)
        grammar.accept_token(self.tokenizer.eos_token)
        self.assertTrue(grammar.is_terminated())


if __name__ == "__main__":
    unittest.main()
