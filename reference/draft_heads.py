"""Draft heads besides EAGLE-1/2 (eagle.py): EAGLE-3, a layer of an MTP draft, a plain language model, Gemma-4's assistant."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from .gemma4 import embed, gemma_layer
from .layers import Weights, rms_norm
from .llama import decoder_layer, in_window
from .sizes import LlamaShape

# What a draft head computes for each row, whatever head it is.


@dataclass(frozen=True, slots=True)
class DraftRows:
    """One forward of a draft head over R rows.

    hidden [R, H]        residual sum: what the next draft step consumes, or the next layer of a chained MTP draft
    logits [R, V]        over the target's vocabulary; -inf for a token that the draft cannot propose
    keys   [L, R, G, D]  as the draft's KV pool stores them, after RoPE; of latent attention [L, R, 1, C+P] (layers.py)
    values [L, R, G, D]  of latent attention empty
    """

    hidden: Tensor
    logits: Tensor
    keys: Tensor
    values: Tensor


class StateHead:
    """A head that consumes states: row i has x[i+1], and each draft step stands one position on."""

    __slots__ = ()
    ahead: ClassVar[int] = 1
    moves: ClassVar[bool] = True

    def feed(self, hidden: Tensor) -> Tensor:
        """What committed rows consume: what the target hands over [R, ..], as it is."""
        return hidden


def behind(stored: DraftRows | None, rows: DraftRows) -> DraftRows:
    """Rows behind those that are stored, for later rows to see: keys and values of all, hidden and logits of the new ones.

    Logits are large, and few callers want those of all. stored: E rows, or None; rows: R -> keys and values [L, E + R, G, D].
    """
    if stored is None:
        return rows
    keys, values = torch.cat([stored.keys, rows.keys], 1), torch.cat([stored.values, rows.values], 1)
    return DraftRows(rows.hidden, rows.logits, keys, values)


# The EAGLE-3 draft head: one forward over rows, each of which consumes a token and a hidden state.
#
# Source: EAGLE-3 (arXiv 2503.01840) §3.1. Differences to EAGLE-1/2 (eagle.py):
#
# * The target hands over its residual stream at several depths, side by side; fc makes one state of it, for committed rows
#   only. Between draft decode steps the head consumes its own state, which has that width already, and fc is left out.
# * Attention reads [norm(embedding), norm(hidden)], of width 2H. The residual sum is the hidden state's alone, so the token
#   reaches it through attention.
# * Logits come from a norm and an LM head of the draft's own, over a vocabulary that may be a part of the target's. What is
#   fed on is the residual sum *before* that norm.
#
# Later heads vary this. EAGLE-3.1 (arXiv 2605.09992) norms each of the target's states by itself before fc (`fc_norm`), and
# feeds the normed sum on (`norm_output`). Others norm the states side by side (`norm_before_fc`: vLLM, speculators). A head of
# several layers has the token in the first alone; the others are layers of a Llama, whose norm before attention is called
# `hidden_norm` in SGLang, and `input_layernorm` in vLLM and speculators.


@dataclass(frozen=True, slots=True)
class Eagle3Head(StateHead):
    """An EAGLE-3 draft head, with the target's embedding.

    weights    float64, names of an EAGLE-3 checkpoint: `fc.weight [H, A*T]` for A states of the target of width T,
               `fc.bias [H]`, `input_norm.weight [A*T]` (norm_before_fc) and `fc_norm.{n}.weight [T]` where it has them,
               `midlayer.…`, of several layers `layers.{n}.…` from 1 on, `norm.weight [H]`, `lm_head.weight [N, H]`
    embedding  [V, H] of the target
    proposes   [N] the token of the target's vocabulary that each id of the draft's stands for
    norm_output  what is fed on is normed
    """

    weights: Weights
    shape: LlamaShape
    embedding: Tensor
    proposes: Tensor
    norm_output: bool = False

    def feed(self, hidden: Tensor) -> Tensor:
        """What committed rows consume, from the states that the target hands over [R, A*T] -> [R, H]."""
        weights, eps = self.weights, self.shape.rms_norm_eps
        if "input_norm.weight" in weights:
            hidden = rms_norm(hidden, weights["input_norm.weight"], eps)
        if "fc_norm.0.weight" in weights:
            states = hidden.chunk(hidden.shape[-1] // weights["fc_norm.0.weight"].shape[0], -1)
            hidden = torch.cat([rms_norm(state, weights[f"fc_norm.{n}.weight"], eps) for n, state in enumerate(states)], -1)
        return linear(hidden, weights["fc.weight"], weights.get("fc.bias"))

    def rows(self, tokens: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor, before: DraftRows | None) -> DraftRows:
        """See draft_rows in eagle.py."""
        weights, eps = self.weights, self.shape.rms_norm_eps
        token = rms_norm(self.embedding[tokens], weights["midlayer.input_layernorm.weight"], eps)  # [R, H]
        state = rms_norm(hidden, weights["midlayer.hidden_norm.weight"], eps)  # [R, H]
        inner = torch.cat([token, state], -1)  # [R, 2H]
        x, keys, values = hidden, list[Tensor](), list[Tensor]()
        for layer in range(self.shape.num_layers):
            prefix = f"layers.{layer}." if layer else "midlayer."
            if layer:
                inner = rms_norm(x, weights[f"{prefix}hidden_norm.weight"], eps)  # [R, H]
            stored = None if before is None else (before.keys[layer], before.values[layer])
            within = in_window(sees, self.shape.window(layer))
            x, key, value = decoder_layer(
                weights, prefix, self.shape, x, positions, within, inner=inner, before=stored
            )  # [R, H], [R, G, D], [R, G, D]
            keys.append(key)
            values.append(value)
        normed = rms_norm(x, weights["norm.weight"], eps)  # [R, H]
        proposed = normed @ weights["lm_head.weight"].T  # [R, N]
        logits = proposed.new_full((len(x), len(self.embedding)), -torch.inf)  # [R, V]
        logits[:, self.proposes] = proposed
        return DraftRows(normed if self.norm_output else x, logits, torch.stack(keys), torch.stack(values))


def proposed_tokens(d2t: Tensor) -> Tensor:
    """The target's token of each draft id, from a checkpoint's d2t [N], which holds the difference of the two -> [N]."""
    return torch.arange(len(d2t), device=d2t.device) + d2t


# One layer of an MTP draft: as MiMo-V2 and Step-3.5 have it, and as DeepSeek-V3's NextN layer is (DESIGN 3.7).
#
# Row i of layer k consumes (token x[i+1+k], hidden) at position i, as mtp.py says: embedding and hidden state are normalized,
# each by a norm of its own, and joined; a decoder layer follows, a final norm and the LM head. Source: DeepSeek-V3 (arXiv
# 2412.19437) §2.2, equations 21-23, which write the hidden state first in the concatenation and have no norm before the LM
# head. Embedding first, and that norm, are the implementations'.
#
# The state that a chained layer hands on is the one before the final norm: that is Step-3.5's (vLLM, NeMo). DeepSeek's and
# GLM's layers hand on the normed state (`normed`).
#
# Differences to an EAGLE-1/2 head: those three norms, an input norm before attention, and which state is handed on.


@dataclass(frozen=True, slots=True)
class MtpHead(StateHead):
    """A head with the target's embedding and LM head.

    weights  float64: `enorm.weight [H]`, `hnorm.weight [H]`, `eh_proj.weight [H, 2H]` (embedding first), `layers.0.…`,
             `norm.weight [H]`
    embedding [V, H] and lm_head [V, H] of the target
    normed   what is handed on is the state after the final norm
    """

    weights: Weights
    shape: LlamaShape
    embedding: Tensor
    lm_head: Tensor
    normed: bool = False

    def rows(self, tokens: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor, before: DraftRows | None) -> DraftRows:
        """See draft_rows."""
        eps = self.shape.rms_norm_eps
        embedded = rms_norm(self.embedding[tokens], self.weights["enorm.weight"], eps)  # [R, H]
        normed = rms_norm(hidden, self.weights["hnorm.weight"], eps)  # [R, H]
        x = torch.cat([embedded, normed], -1) @ self.weights["eh_proj.weight"].T  # [R, H]
        stored = None if before is None else (before.keys[0], before.values[0])
        within = in_window(sees, self.shape.window(0))
        x, key, value = decoder_layer(self.weights, "layers.0.", self.shape, x, positions, within, before=stored)
        last = rms_norm(x, self.weights["norm.weight"], eps)  # [R, H]
        return DraftRows(last if self.normed else x, last @ self.lm_head.T, key[None], value[None])


# A plain language model as draft (SGLang's STANDALONE): it reads the committed tokens, and nothing of the target.
#
# Such a model was trained with x[i] at position i, and its row i is a function of x[0..i] alone. So its rows of committed
# tokens are 0..M, one more than an EAGLE head has: row M consumes the bonus token x[M], and d[1] is chosen from it. Draft
# decode step j = 1..num_steps-1 consumes d[j] at position M + j. There are no hidden states. Source: speculative decoding with
# a small model (arXiv 2211.17192 §2.1, 2302.01318 §2), and the definition of a causal language model.
#
# An EAGLE head reads one token ahead of its position, since h[i] has told it of x[0..i] already. A plain model that is run so,
# on x[1..] at positions 0.., is the model of a text without its first token. `ahead` says which of the two a draft is run as.


@dataclass(frozen=True, slots=True)
class PlainDraft:
    """A Llama with its own embedding and LM head.

    weights  float64, Hugging Face's Llama names
    ahead    row i consumes x[i + ahead]: 0, as it was trained
    """

    weights: Weights
    shape: LlamaShape
    ahead: int = 0
    moves: ClassVar[bool] = True  # each step stands one position on

    @property
    def embedding(self) -> Tensor:
        """[V, H], its own."""
        return self.weights["model.embed_tokens.weight"]

    def feed(self, hidden: Tensor) -> Tensor:
        """What rows consume of the target's states: nothing. [R, ..] -> [R, 0]."""
        return hidden[:, :0]

    def rows(self, tokens: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor, before: DraftRows | None) -> DraftRows:  # noqa: ARG002
        """See eagle.draft_rows."""
        x = self.embedding[tokens]  # [R, H]
        keys, values = [], []
        for layer in range(self.shape.num_layers):
            stored = None if before is None else (before.keys[layer], before.values[layer])
            x, key, value = decoder_layer(self.weights, f"model.layers.{layer}.", self.shape, x, positions, sees, before=stored)
            keys.append(key)
            values.append(value)
        normed = rms_norm(x, self.weights["model.norm.weight"], self.shape.rms_norm_eps)  # [R, H]
        logits = linear(normed, self.weights["lm_head.weight"])  # [R, V]
        return DraftRows(x[:, :0], logits, torch.stack(keys), torch.stack(values))


# A draft without a memory of its own, which reads the target's rows: Gemma-4's assistant (SGLang's frozen-KV MTP).
#
# With x[0..M] committed the target has rows 0..M-1. Every forward of a round stands at position M - 1, with the last of them,
# and sees those rows and nothing else, its own row and those of its round not among them. The first consumes the bonus token
# and the state of that row, (x[M], h[M-1]); step j = 1..num_steps-1 consumes d[j] and the state that the forward before it
# handed on.
#
# So the first forward is what row M - 1 of an EAGLE head is: (x[i+1], h[i]) at position i. It is a function of committed tokens
# alone, and what it proposes is d[1]. There are no rows to store.
#
# Each layer reads the rows of the target's last layer of its kind, with a window or without. Source: Google's
# Gemma4AssistantForCausalLM in transformers, and its text on drafting from a single position; docs/explanation/frozen-kv.md
# says where engines differ.


@dataclass(frozen=True, slots=True)
class FrozenHead(StateHead):
    """A head with the target's embedding, and an LM head of its own.

    weights  float64: `pre_projection.weight [H, 2B]` (embedding first), `model.layers.{n}.…` without keys and values,
             `model.norm.weight [H]`, `lm_head.weight [V, H]`, `post_projection.weight [B, H]`; B: the target's hidden size
    embedding [V, B] of the target
    reads    of each layer, the target's layer whose rows it reads
    memory   keys and values [L, E, G, D] of the target's rows, by its layers; None: not known yet
    """

    weights: Weights
    shape: LlamaShape
    embedding: Tensor
    reads: tuple[int, ...]
    memory: tuple[Tensor, Tensor] | None = None
    moves: ClassVar[bool] = False  # all forwards of a round stand at one position; the first consumes x[i+1] at position i

    def rows(self, tokens: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor, before: DraftRows | None) -> DraftRows:  # noqa: ARG002
        """See eagle.draft_rows. Of sees [R, ..] the first E are the target's rows; the others would be those of this round."""
        if self.memory is None:
            raise ValueError("a draft that reads the target's rows was run without them")
        keys, values = self.memory
        committed = sees[:, : keys.shape[1]]  # [R, E]
        given = torch.cat([embed(self.embedding, tokens), hidden], -1)  # [R, 2B]
        x = linear(given, self.weights["pre_projection.weight"])  # [R, H]
        for layer, read in enumerate(self.reads):
            window = self.shape.window(layer)
            x, _, _ = gemma_layer(
                self.weights,
                f"model.layers.{layer}.",
                self.shape,
                x,
                positions,
                in_window(committed, window),
                windowed=window > 0,
                memory=(keys[read], values[read]),
            )
        normed = rms_norm(x, self.weights["model.norm.weight"], self.shape.rms_norm_eps)  # [R, H]
        nothing = x.new_zeros(0, len(tokens), 1, 1)
        handed_on = linear(normed, self.weights["post_projection.weight"])  # [R, B]
        return DraftRows(handed_on, linear(normed, self.weights["lm_head.weight"]), nothing, nothing)
