"""What determines a trained pair: the sizes of its models, how long each is trained, on how much text it is measured.

Plain numbers, and no torch: the command line reads the names of the sizes from here.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Literal

from eagletwin.reference.sizes import LlamaShape

Size = Literal["tiny", "small", "large"]

# Tokens are bytes. Two more begin and end a document, and the rest fills the vocabulary up, so that ranks can share it out.
BEGIN, END, VOCABULARY = 256, 257, 272

# Part of a pair's digest: to be raised when the same settings come to mean other weights.
PROCEDURE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How long a model is trained.

    steps    of the optimizer
    windows  of text in each step
    length   of a window, in tokens
    rate     AdamW's largest learning rate
    """

    steps: int
    windows: int
    length: int
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSettings:
    """All that determines a pair, next to the text and the software.

    name              the size, by which the pair's folder is called
    target, draft     sizes; the target's aux_layers are those whose output an EAGLE-3 draft consumes
    intermediate_size width of the MLP of both
    max_position      context length that the checkpoints declare; the models know positions below `length` of their courses
    draft_vocab_size  tokens that the EAGLE-3 draft can propose: the most frequent ones
    mtp_layers        layers of the MTP draft
    self_fed          drafts in a row that an EAGLE or EAGLE-3 head is trained to make, each from its own state
    prompts           held-out prompts of `prompt_size` tokens on which accept lengths are measured, `new_tokens` tokens each,
                      with `num_steps` drafts a round
    seed              of all that is drawn
    """

    name: str
    target: LlamaShape
    draft: LlamaShape
    intermediate_size: int
    target_course: Course
    draft_course: Course
    max_position: int = 2048
    draft_vocab_size: int = 128
    mtp_layers: int = 3
    self_fed: int = 3
    prompts: int = 20
    prompt_size: int = 64
    new_tokens: int = 48
    num_steps: int = 3
    seed: int = 0

    def digest(self, text: str) -> str:
        """Of these settings and the digest of the text: what differs in neither is the same pair."""
        facts = json.dumps([PROCEDURE, asdict(self), text], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()


def shape(hidden_size: int, num_layers: int, num_heads: int, num_kv_heads: int, aux_layers: tuple[int, ...]) -> LlamaShape:
    """A target whose heads share the hidden size out."""
    return LlamaShape(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        aux_layers=aux_layers,
    )


def draft_of(target: LlamaShape) -> LlamaShape:
    """A draft of one layer like the target's."""
    return replace(target, num_layers=1, aux_layers=())


TINY, SMALL, LARGE = (
    shape(128, 4, 4, 2, (0, 1, 2)),
    shape(256, 6, 8, 4, (0, 2, 4)),
    # the layers that SGLang takes if a checkpoint names none
    shape(640, 12, 10, 2, (1, 5, 8)),
)
SIZES: dict[Size, PairSettings] = {
    "tiny": PairSettings(  # 0.8 million parameters
        name="tiny",
        target=TINY,
        draft=draft_of(TINY),
        intermediate_size=352,
        target_course=Course(steps=1400, windows=4, length=256, rate=3e-3),
        draft_course=Course(steps=600, windows=1, length=256, rate=2e-3),
    ),
    "small": PairSettings(  # 4.6 million
        name="small",
        target=SMALL,
        draft=draft_of(SMALL),
        intermediate_size=704,
        target_course=Course(steps=2000, windows=8, length=256, rate=2e-3),
        draft_course=Course(steps=800, windows=2, length=256, rate=1e-3),
    ),
    "large": PairSettings(  # 52 million
        name="large",
        target=LARGE,
        draft=draft_of(LARGE),
        intermediate_size=1728,
        target_course=Course(steps=2500, windows=32, length=512, rate=6e-4),
        draft_course=Course(steps=1500, windows=8, length=512, rate=6e-4),
    ),
}
