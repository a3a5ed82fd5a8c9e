"""Record by what verify chooses: coins, distributions, and the masks of grammars."""

import contextlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import GrammarBackend
from eagletwin.harness.core.trace import snapshot
from eagletwin.harness.engines.inside.blame import hand_on

from ..grammars import CLASSES

# Record what a verify that samples is given: its coins, and the distributions as the kernel reads them. Made by taps.py.
#
# SGLang draws the coins just before it calls the function that decides, whichever that is, so that call is where all of it is
# together. An all-greedy batch makes none, and has nothing of this in its records.
#
# The logits that the distributions are made of are those of the target's forward, which inner.py hands over. Every release adds
# penalties, biases and masks to them in place, and divides by the temperature elsewhere: when the function that decides is
# called, they are what the softmax was given.

# Whatever a release calls, and everything through which it reaches it: in 0.5.17 eagle_sample imports both each time.
_FUNCTIONS = ("tree_speculative_sampling_target_only", "chain_speculative_sampling_triton")
_MODULES = (
    "sglang.srt.speculative.eagle_utils",
    "sglang.kernels.ops.speculative.reject_sampling",
    "sglang.kernels.ops.speculative.sampling",
    "sglang.srt.speculative.reject_sampling",  # 0.5.14 and 0.5.15
    "sgl_kernel",
)


class Coins:
    """Watches from `start` to `stop`. Between two rounds it holds what the last verify was given."""

    def __init__(self) -> None:
        self._wrapped: list[tuple[Any, str, Callable[..., Any]]] = []
        self._given: dict[str, Array] = {}
        self._output: Any = None  # of the target's forward, until the verify has decided

    def start(self) -> None:
        for module in _MODULES:
            with contextlib.suppress(ImportError):
                owner = importlib.import_module(module)
                for name in _FUNCTIONS:
                    original = vars(owner).get(name)
                    if original is not None:
                        self._wrapped.append((owner, name, original))
                        setattr(owner, name, self._around(original))

    def stop(self) -> None:
        for owner, name, original in reversed(self._wrapped):
            setattr(owner, name, original)
        self._wrapped.clear()

    def clear(self) -> None:
        """Before a verify: whatever it decides by comes after."""
        self._given, self._output = {}, None

    def note_output(self, output: Any) -> None:
        """The target's forward of a verify has returned this. It is held only where what is sampled is recorded: the logits of
        a server are large."""
        if self._wrapped:
            self._output = output

    def of(self, number: int, path: Array) -> dict[str, Array]:
        """Of request `number` of the batch, with these accepted nodes: empty if the batch was verified greedily.

        coins [D], final_coins [1], target_probabilities [len(path), V] of what follows each accepted node, target_logits
        [len(path), V] that they were made of, draft_probabilities [S, V] of what each draft token was drawn from, under
        rejection sampling.
        """
        if not self._given:
            return {}
        inputs = {name: tensor[number] for name, tensor in self._given.items()}
        rows = path.clip(0, len(inputs["coins"]) - 1)
        return inputs | {name: inputs[name][rows] for name in ("target_probabilities", "target_logits") if name in inputs}

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        chain = original.__name__ == _FUNCTIONS[1]

        def sample(*args: Any, **kwargs: Any) -> Any:
            given = {
                "coins": kwargs["uniform_samples"],
                "final_coins": kwargs["uniform_samples_for_final_sampling"][:, None],
                "target_probabilities": kwargs["target_probs"],
            }
            if chain:  # the other function is given zeros, which it writes into
                given["draft_probabilities"] = kwargs["draft_probs"]
            output, self._output = self._output, None
            if output is not None and output.next_token_logits.numel() == kwargs["target_probs"].numel():
                given["target_logits"] = output.next_token_logits.reshape(kwargs["target_probs"].shape)
            self._given = {name: snapshot(tensor) for name, tensor in given.items()}
            return hand_on(original, *args, **kwargs)

        return sample


# Record which tokens the grammars of a batch let a forward give: the mask that SGLang applies to its logits. Made by taps.py.
#
# A mask is packed, 32 tokens to an integer. It has a row for each request of a prefill, and for each node of each tree of a
# round; a batch without grammars has none.

_APPLY = "apply_vocab_mask"


class Masks:
    """Watches from `start` to `stop`. vocabulary: the model's tokens; 0: the case has no grammars, and nothing is watched.
    backend: what makes the masks."""

    def __init__(self) -> None:
        self.vocabulary = 0
        self.backend: GrammarBackend = "xgrammar"
        self._owner: Any = None
        self._original: Any = None
        self._applied: Array | None = None

    def start(self) -> None:
        if not self.vocabulary:
            return
        module, owner = CLASSES[self.backend]
        self._owner = getattr(importlib.import_module(module), owner)
        self._original = inspect.getattr_static(self._owner, _APPLY)
        static = isinstance(self._original, staticmethod)
        call = self._original.__func__ if static else self._original

        def note_mask(*args: Any, **kwargs: Any) -> Any:
            self._applied = snapshot(kwargs["vocab_mask"] if "vocab_mask" in kwargs else args[-1])
            return hand_on(call, *args, **kwargs)

        setattr(self._owner, _APPLY, staticmethod(note_mask) if static else note_mask)

    def stop(self) -> None:
        if self._owner is not None:
            setattr(self._owner, _APPLY, self._original)
            self._owner = None

    def clear(self) -> None:
        """Before a forward whose logits tokens are chosen by."""
        self._applied = None

    def of(self, number: int, requests: int) -> dict[str, Array]:
        """What was applied to the rows of request `number` of so many: allowed [n, V], 1 for each token that may come. Empty
        where no mask was."""
        if self._applied is None:
            return {}
        bits = np.unpackbits(self._applied.view(np.uint8), axis=-1, bitorder="little")[:, : self.vocabulary]
        return {"allowed": bits.reshape(requests, -1, self.vocabulary)[number].copy()}
