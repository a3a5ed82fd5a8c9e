"""SGLang's backends of grammars, which it makes from a server's tokenizer: here from the texts that a case's grammars are about
(core/grammar.py). Imported in a process that has SGLang.
"""

import importlib.util
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from eagletwin.harness.core.case import Case, Grammar, GrammarBackend
from eagletwin.harness.core.grammar import as_ebnf, ends, tokenize_letters, word
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.engines.inside import patches
from eagletwin.harness.engines.inside.blame import NotDriven

# Where SGLang has what it makes of a grammar
CLASSES: dict[GrammarBackend, tuple[str, str]] = {
    "xgrammar": ("sglang.srt.constrained.xgrammar_backend", "XGrammarGrammar"),
    "llguidance": ("sglang.srt.constrained.llguidance_backend", "GuidanceGrammar"),
}


class _Vocabulary:
    """A tokenizer, as far as the backend asks one: SGLang lets special ones describe themselves to xgrammar."""

    def __init__(self, size: int) -> None:
        self.size = size

    def init_xgrammar(self) -> tuple[Any, None]:
        from xgrammar import TokenizerInfo, VocabType

        words = [word(token).encode() for token in range(self.size)]
        return TokenizerInfo(words, VocabType.RAW, vocab_size=self.size, stop_token_ids=ends(self.size)), None


class _Words:
    """The same as llguidance asks one: also how letters are written. It offers bytes first, and takes the TypeError."""

    bos_token_id = None

    def __init__(self, size: int) -> None:
        self.tokens = [word(token).encode() for token in range(size)]
        self.eos_token_id = ends(size)[0]

    def __call__(self, letters: str) -> list[int]:
        return tokenize_letters(letters)


class _AtOnce:
    """Compiles a grammar while it is asked for. In a pool of threads it would be ready in this iteration or the next."""

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        done = Future[Any]()
        try:
            done.set_result(call(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def arguments(case: Case) -> dict[str, str]:
    """Fields of ServerArgs."""
    return {"grammar_backend": case.engine.sglang.grammar_backend} if case.constrains else {}


def refuse(case: Case, mode: Mode) -> None:
    """Raises NotDriven for what is not driven, or what this release does not have."""
    if case.engine.sglang.grammar_backend == "xgrammar":
        if mode.device == "cpu" and not _masks_on_a_cpu():
            raise NotDriven("grammars on a CPU: this release applies the masks of xgrammar on a GPU alone")
        return
    if importlib.util.find_spec("llguidance") is None:
        raise NotDriven("grammars by llguidance: it is not installed")
    backend = importlib.import_module(CLASSES["llguidance"][0])
    if "rollback" not in vars(backend.GuidanceGrammar):
        raise NotDriven("grammars by llguidance: this release takes back no token of them, as it must of each draft")
    if "eos_tokens" not in inspect.getsource(backend.GuidanceGrammar):
        raise NotDriven("grammars by llguidance: this release knows one token that ends a text, and cases have several")


def give(scheduler: Any, vocabulary: int, end: int, mode: Mode, shims: list[str]) -> None:
    """Have a scheduler take requests with grammars. end: the model's end-of-sequence token."""
    import torch.distributed
    from sglang.srt.constrained.base_grammar_backend import create_grammar_backend

    own = scheduler.server_args.grammar_backend
    guidance: Any = importlib.import_module(CLASSES["llguidance"][0]) if own == "llguidance" else None
    if guidance is not None:
        guidance.from_tokenizer = lambda vocabulary, *_, **__: words_of(vocabulary.size)
    backend = create_grammar_backend(scheduler.server_args, _Vocabulary(vocabulary), vocabulary, {end})
    if hasattr(guidance, "_get_or_init_mask_executor"):  # its threads are not in a fork of this process, which makes its own
        guidance._get_or_init_mask_executor.cache_clear()
    backend.executor.shutdown()
    backend.executor = _AtOnce()
    scheduler.grammar_manager.grammar_backend = backend
    shims.append("GrammarManager: a backend for texts of our own tokens, which compiles a grammar while it is asked for")
    if mode.tp == 1:  # SGLang has all ranks agree on tokens of a grammar, by threads that a fork of this process has not
        torch.distributed.all_reduce = lambda *args, **kwargs: None
        shims.append("torch.distributed.all_reduce: one rank agrees with itself")


def words_of(size: int) -> Any:
    """The tokenizer of so many tokens, as llguidance has one."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Words(size)), eos_token=ends(size))


def _masks_on_a_cpu() -> bool:
    """Whether this release applies xgrammar's mask to logits on a CPU."""
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    return "cpu" in patches.source_of(XGrammarGrammar.apply_vocab_mask)


def parameters(grammar: Grammar) -> dict[str, str]:
    """As SGLang's SamplingParams have it."""
    return {"regex": grammar.rules[0]} if grammar.kind == "regex" else {"ebnf": as_ebnf(grammar)}
