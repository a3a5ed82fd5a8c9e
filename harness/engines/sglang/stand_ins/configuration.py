"""A model configuration and a tokenizer without text, where transformers' are stubbed."""

import sys
from typing import Any

import torch

from .stubs import StubModule

# What SGLang's model classes take of transformers' PreTrainedModel, where that is stubbed: a module with a configuration.
#
# The real one costs 3 s of imports in each process, most of them of torch's compiler, and makes and saves models that
# transformers loads. SGLang loads its own, and calls none of that: Gemma-4's classes inherit from it, keep their configuration
# in it, and ask it to fill in weights that SGLang fills in afterwards.

_MODULE, _CLASS = "transformers.modeling_utils", "PreTrainedModel"
SHIM = f"{_MODULE}.{_CLASS}: a torch module with a configuration, for SGLang's classes that inherit from it"


class KeptConfiguration(torch.nn.Module):
    """Stands for PreTrainedModel."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.config = config

    def post_init(self) -> None:
        """transformers would fill in weights that no checkpoint has; SGLang's loader does it."""


def stand_in() -> None:
    """For classes that are imported from now on. Where transformers' own is not stubbed it stays."""
    import transformers

    __import__(_MODULE)
    found = sys.modules[_MODULE]
    if isinstance(found, StubModule):
        setattr(found, _CLASS, KeptConfiguration)
        setattr(transformers, _CLASS, KeptConfiguration)


def lacks_it(found: Any) -> bool:
    """Whether this is a class that inherits from the stub: its module was imported before `stand_in`."""
    bases = found.__mro__[1:] if isinstance(found, type) else ()
    return any((base.__module__, base.__qualname__.rpartition(".")[2]) == (_MODULE, _CLASS) for base in bases)


# A tokenizer without text, for requests with min_new_tokens: SGLang asks it which tokens end a request, beside those that the
# model's configuration and the request name, and with which token the first turn of a session begins. It names none, and a case
# has no text that could stop one.


class Ends:
    """What SGLang reads of a tokenizer there."""

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    additional_stop_token_ids: frozenset[int] | None = None

    def encode(self, text: str, **_options: object) -> list[int]:
        raise NotImplementedError(f"a case has tokens alone, and SGLang wants those of the text {text!r}")

    def decode(self, tokens: list[int], **_options: object) -> str:
        raise NotImplementedError(f"a case has tokens alone, and SGLang wants the text of {tokens}")
