"""Model recipes: seeded tiny target / draft pairs, each with the hidden states it feeds and the acceptance it was built for.

A recipe is only a declaration; weights.py makes the numbers and store.py writes the checkpoint. The draft is *correlated*
with the target: its layer is the target's last layer plus noise, so it agrees with the target at some steps and not at
others, and every accept length occurs. Random pairs agree almost never, and leave everything after verify untested.
"""

from dataclasses import dataclass
from typing import Literal

from eagletwin.reference.sizes import LlamaShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One target / draft pair.

    family         whose model classes an engine runs it with, and how its checkpoint is written (store.py). The two that are no
                   Llamas are multi-layer, and their feed-forward layers are dense
    target_hidden  which target state the draft consumes as h[i] (DESIGN §2)
    draft_hidden   which of its own states the draft feeds on between draft decode steps
    noise          relative size of the noise that separates draft and target: larger accepts less
    attention_gain, mlp_gain  size of the layers' contributions to the residual stream; larger means more context
    draft_vocab_size  size of a vocabulary of the draft's own, whose ids a d2t of the checkpoint maps to the target's; None:
                   it is the target's
    mtp_layers     layers of a multi-layer draft (MTP), of which a case uses the first num_steps; 0: a single head
    chained        a layer of an MTP draft consumes the state of the layer below; else every layer the target's
    window         positions that layers with a sliding window attend to; the reference knows none, so no case goes beyond.
                   0: no such layers
    min_share      every accept length 1..num_steps+1 occurs in at least this share of rounds, for num_steps 1..5 (measured
                   over 24 prompts, 6 of a deep target, by tests/models/test_acceptance_profile.py)
    """

    name: str
    target: LlamaShape
    draft: LlamaShape
    intermediate_size: int
    max_position: int
    seed: int
    noise: float
    attention_gain: float
    mlp_gain: float
    target_hidden: Literal["post_norm", "pre_norm", "aux"]
    draft_hidden: Literal["residual"]
    min_share: float
    draft_vocab_size: int | None = None
    mtp_layers: int = 0
    chained: bool = False
    family: Literal["llama", "mimo_v2", "step3p5"] = "llama"
    window: int = 0

    @property
    def end_of_sequence(self) -> int:
        """The target's end-of-sequence token."""
        return self.target.vocab_size - 1

    @property
    def kv_heads(self) -> int:
        """KV heads of the one that has fewer, target or draft: ranks share them out evenly."""
        return min(self.target.num_kv_heads, self.draft.num_kv_heads)

    @property
    def drafts(self) -> tuple[str, ...]:
        """What the draft's KV pools are called in a trace, by layer."""
        return ("draft", *(f"draft{layer}" for layer in range(1, self.mtp_layers)))

    @property
    def algorithm(self) -> Literal["EAGLE", "EAGLE3"]:
        """Which head the draft is, by SGLang's name for it."""
        return "EAGLE3" if self.target_hidden == "aux" else "EAGLE"


def _llama(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    aux_layers: tuple[int, ...] = (),
    *,
    pre_norm: bool = False,
    qk_norm: bool = False,
) -> LlamaShape:
    return LlamaShape(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,  # the smallest block the attention kernels work on without padding
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        aux_layers=aux_layers,
        pre_norm=pre_norm,
        qk_norm=qk_norm,
    )


# More than any generated case needs, and less than the smallest pool that one is given: SGLang wants room for a whole window.
_WINDOW = 72

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="llama-tiny",
            target=_llama(32, 1, 2, 2, 96),
            draft=_llama(32, 1, 2, 2, 96),
            intermediate_size=48,
            max_position=4096,
            seed=11,
            noise=0.09,
            attention_gain=0.6,
            mlp_gain=0.6,
            target_hidden="post_norm",
            draft_hidden="residual",
            min_share=0.08,
        ),
        Recipe(
            name="llama-gqa",
            target=_llama(64, 2, 4, 2, 128),
            draft=_llama(64, 1, 4, 2, 128),
            intermediate_size=96,
            max_position=4096,
            seed=13,
            noise=0.1,
            attention_gain=0.2,
            mlp_gain=0.2,
            target_hidden="post_norm",
            draft_hidden="residual",
            min_share=0.05,
        ),
        Recipe(
            name="llama-eagle3-full",
            target=_llama(32, 4, 2, 2, 96, aux_layers=(0, 1, 2)),
            draft=_llama(32, 1, 2, 2, 96),
            intermediate_size=48,
            max_position=4096,
            seed=40,
            noise=0.05,
            attention_gain=0.06,
            mlp_gain=0.06,
            target_hidden="aux",
            draft_hidden="residual",
            min_share=0.08,
        ),
        Recipe(
            name="llama-eagle3",
            target=_llama(32, 4, 2, 2, 96, aux_layers=(0, 1, 2)),
            draft=_llama(32, 1, 2, 2, 96),
            intermediate_size=48,
            max_position=4096,
            seed=41,
            noise=0.05,
            attention_gain=0.06,
            mlp_gain=0.06,
            target_hidden="aux",
            draft_hidden="residual",
            min_share=0.06,
            draft_vocab_size=64,
        ),
        Recipe(
            name="llama-mtp",
            target=_llama(32, 1, 2, 2, 96),
            draft=_llama(32, 1, 2, 2, 96),
            intermediate_size=48,
            max_position=4096,
            seed=61,
            noise=0.09,
            attention_gain=0.6,
            mlp_gain=0.6,
            target_hidden="post_norm",
            draft_hidden="residual",
            min_share=0.05,
            mtp_layers=4,
        ),
        Recipe(
            name="llama-mtp-chain",
            target=_llama(32, 1, 2, 2, 96),
            draft=_llama(32, 1, 2, 2, 96),
            intermediate_size=48,
            max_position=4096,
            seed=62,
            noise=0.09,
            attention_gain=0.6,
            mlp_gain=0.6,
            target_hidden="post_norm",
            draft_hidden="residual",
            min_share=0.05,
            mtp_layers=4,
            chained=True,
        ),
        Recipe(
            name="mimo-v2",
            target=_llama(32, 2, 2, 2, 96),
            draft=_llama(32, 1, 2, 2, 96),
            intermediate_size=48,
            max_position=4096,
            seed=71,
            noise=0.09,
            attention_gain=0.2,
            mlp_gain=0.2,
            target_hidden="post_norm",
            draft_hidden="residual",
            min_share=0.05,
            mtp_layers=4,
            family="mimo_v2",
            window=_WINDOW,
        ),
        Recipe(
            name="step-3.5",
            # its draft layer takes itself for number 45 of the target, whatever the target is, and attends as number 45 - n
            target=_llama(32, 45, 2, 2, 96, pre_norm=True, qk_norm=True),
            draft=_llama(32, 1, 2, 2, 96, qk_norm=True),
            intermediate_size=48,
            max_position=4096,
            seed=72,
            noise=0.09,
            attention_gain=0.04,
            mlp_gain=0.04,
            target_hidden="pre_norm",
            draft_hidden="residual",
            min_share=0.05,
            mtp_layers=4,
            chained=True,
            family="step3p5",
            window=_WINDOW,
        ),
    )
}
