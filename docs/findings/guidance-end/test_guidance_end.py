"""With llguidance the token that ends a text ends its grammar."""

import unittest

from sglang.srt.constrained.llguidance_backend import (
    GuidanceGrammar,
    LLTokenizer,
    grammar_from,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


class TestGuidanceEnd(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tokenizer = LLTokenizer("byte")

    def read(self, regex, text):
        grammar = GuidanceGrammar(self.tokenizer, grammar_from("regex", regex))
        for byte in text:
            grammar.accept_token(byte)
        return grammar

    def test_a_text_that_could_go_on(self):
        for regex, text in (("ab?", b"a"), ("a*", b""), ("a*", b"aa")):
            grammar = self.read(regex, text)
            grammar.accept_token(self.tokenizer.eos_token)
            self.assertTrue(grammar.is_terminated(), f"{regex} after {text}")

    def test_a_text_that_could_not(self):
        grammar = self.read("ab", b"ab")
        self.assertFalse(grammar.is_terminated())
        grammar.accept_token(self.tokenizer.eos_token)
        self.assertTrue(grammar.is_terminated())

    def test_the_end_is_taken_back(self):
        for regex, text in (("ab?", b"a"), ("ab", b"ab")):
            grammar = self.read(regex, text)
            grammar.accept_token(self.tokenizer.eos_token)
            grammar.rollback(1)
            self.assertFalse(grammar.is_terminated())
            grammar.rollback(len(text))
            for byte in text:
                grammar.accept_token(byte)
            grammar.accept_token(self.tokenizer.eos_token)
            self.assertTrue(grammar.is_terminated(), f"{regex} after {text}")


if __name__ == "__main__":
    unittest.main()
