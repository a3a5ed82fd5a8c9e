"""SGLang's backend of grammars, which it makes from a server's tokenizer: here from the texts that a case's grammars are about
(core/grammar.py). Imported in a process that has SGLang.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from eagletwin.harness.core.case import Grammar
from eagletwin.harness.core.grammar import as_ebnf, ends, word
from eagletwin.harness.core.mode import Mode


class _Vocabulary:
    """A tokenizer, as far as the backend asks one: SGLang lets special ones describe themselves to xgrammar."""

    def __init__(self, size: int) -> None:
        self._size = size

    def init_xgrammar(self) -> tuple[Any, None]:
        from xgrammar import TokenizerInfo, VocabType

        words = [word(token).encode() for token in range(self._size)]
        return TokenizerInfo(words, VocabType.RAW, vocab_size=self._size, stop_token_ids=ends(self._size)), None


class _AtOnce:
    """Compiles a grammar while it is asked for. In a pool of threads it would be ready in this iteration or the next."""

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        done = Future[Any]()
        try:
            done.set_result(call(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def give(scheduler: Any, vocabulary: int, end: int, mode: Mode, shims: list[str]) -> None:
    """Have a scheduler take requests with grammars. end: the model's end-of-sequence token."""
    import torch.distributed
    from sglang.srt.constrained.base_grammar_backend import create_grammar_backend

    backend = create_grammar_backend(scheduler.server_args, _Vocabulary(vocabulary), vocabulary, {end})
    backend.executor.shutdown()
    backend.executor = _AtOnce()
    scheduler.grammar_manager.grammar_backend = backend
    shims.append("GrammarManager: a backend for texts of our own tokens, which compiles a grammar while it is asked for")
    if mode.tp == 1:  # SGLang has all ranks agree on tokens of a grammar, by threads that a fork of this process has not
        torch.distributed.all_reduce = lambda *args, **kwargs: None
        shims.append("torch.distributed.all_reduce: one rank agrees with itself")


def mask_on_a_cpu() -> bool:
    """Whether this release applies the mask of a grammar to logits on a CPU."""
    import inspect

    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    return "cpu" in inspect.getsource(XGrammarGrammar.apply_vocab_mask)


def parameters(grammar: Grammar) -> dict[str, str]:
    """As SGLang's SamplingParams have it."""
    return {"regex": grammar.rules[0]} if grammar.kind == "regex" else {"ebnf": as_ebnf(grammar)}
