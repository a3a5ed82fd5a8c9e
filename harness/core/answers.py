"""What a trace says of a request's answer in numbers: why it ended, and what it was told of the probabilities of tokens."""

from enum import IntEnum

# What a message counts for a request. UNSAID: this SGLang's message does not have it.
COUNTS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "cached_device",
    "cached_host",
    "verify_ct",
    "correct_drafts",
    "retractions",
)
UNSAID = -(1 << 31)


class Finish(IntEnum):
    """The kinds of a finish reason. Integers, as all numbers of a record are."""

    LENGTH = 0
    STOP = 1
    ABORT = 2
    OTHER = 3


# Part of a text, and what is said of each of its places: the token there, the best ones, those that were asked for.
LOGPROBS = tuple(f"{part}_{kind}_logprobs" for part in ("input", "output") for kind in ("token", "top", "token_ids"))
