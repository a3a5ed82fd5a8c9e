"""A pair so small that it is trained in seconds, and a short text to train it on."""

from functools import cache

from .train.settings import Course, PairSettings, draft_of, shape
from .train.text import Corpus, standard_library

TARGET = shape(32, 4, 2, 1, (0, 1, 2))
TOY = PairSettings(
    name="toy",
    target=TARGET,
    draft=draft_of(TARGET),
    intermediate_size=48,
    target_course=Course(steps=60, windows=8, length=32, rate=1e-2),
    draft_course=Course(steps=25, windows=2, length=24, rate=5e-3),
    draft_vocab_size=64,
    prompts=2,
    prompt_size=8,
    new_tokens=6,
)


@cache
def library() -> Corpus:
    """Python's library, read once."""
    return standard_library()


def short_text() -> Corpus:
    """The begin of the library."""
    whole = library()
    return Corpus(whole.training[:100_000], whole.held_out[:10_000], "short")
