"""Things that SGLang renamed or moved, under each of their names. The newest comes first."""

from typing import Any

from torch import Tensor

from eagletwin.harness.core.records import UNSAID, Finish

# Things that SGLang renamed or moved, under each of their names. The newest comes first.
#
# Up to 0.5.12.post1 a worker is given a ModelWorkerBatch, which calls a chunk's place `extend_*`, and the next lengths lie in
# the next draft input. Up to 0.5.11 the bonus token is the `verified_id`, and up to 0.5.10.post1 the links of a tree are
# `retrive_*`.


def pick(owner: Any, *names: str) -> Any:
    """The first attribute of these names that `owner` has."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise AttributeError(f"{type(owner).__name__} has none of {', '.join(names)}")


def chunk(batch: Any) -> tuple[list[int], list[int]]:
    """Where each request's rows of a prefill batch start, and how many there are."""
    return list(pick(batch, "prefix_lens", "extend_prefix_lens")), list(pick(batch, "extend_lens", "extend_seq_lens"))


def bonus_tokens(draft_input: Any) -> Tensor:
    """The last committed token of each request [b]."""
    tokens: Tensor = pick(draft_input, "bonus_tokens", "verified_id")
    return tokens


def new_seq_lens(result: Any) -> Tensor:
    """Lengths of the requests when a round is over [b]."""
    lengths = getattr(result, "new_seq_lens", None)
    found: Tensor = result.next_draft_input.new_seq_lens if lengths is None else lengths
    return found


def links(verify_input: Any) -> dict[str, Tensor]:
    """Who is whose child in the trees of a batch [b, D], by the names that a trace has for it."""
    return {
        "retrieve_index": pick(verify_input, "retrieve_index", "retrive_index"),
        "next_token": pick(verify_input, "retrieve_next_token", "retrive_next_token"),
        "next_sibling": pick(verify_input, "retrieve_next_sibling", "retrive_next_sibling"),
    }


def drafts_kept(output: Any) -> list[int]:
    """How many drafts each request of the batch has committed, from the result of the older worker's verify."""
    counts = pick(output, "num_correct_drafts_per_req_cpu", "num_accepted_drafts_per_req_cpu", "accept_length_per_req_cpu")
    return list(counts)


def tokens_kept(output: Any) -> Tensor:
    """The committed tokens of all requests, one request after another, from the same result."""
    tokens: Tensor = pick(output, "accept_tokens", "verified_id")
    return tokens


# What a message to the detokenizer says of a request, beside its tokens, under each of its names. The newest comes first.
#
# The accepted drafts are `spec_accepted_tokens` up to 0.5.10.post1 and `spec_accepted_drafts` in 0.5.11, and their histogram is
# `spec_acceptance_histogram` up to there. A field that a release does not have is recorded as UNSAID, and the judge says so.

# What a trace calls it -> what the message does. One entry a request in each.
_COUNTS: dict[str, tuple[str, ...]] = {
    "prompt_tokens": ("prompt_tokens",),
    "completion_tokens": ("completion_tokens",),
    "cached_tokens": ("cached_tokens",),
    "verify_ct": ("spec_verify_ct",),
    "correct_drafts": ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accepted_tokens"),
    "retractions": ("retraction_counts",),
}
_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_acceptance_histogram")
_KINDS: dict[str, Finish] = {"length": Finish.LENGTH, "stop": Finish.STOP, "abort": Finish.ABORT}


def finish(reason: dict[str, Any]) -> dict[str, int]:
    """Why a request ended, and by what: its last token, or how many it was to have. -1: not said, or no number."""
    numbers = {"finish": int(_KINDS.get(str(reason.get("type")), Finish.OTHER))}
    for name in ("matched", "length"):
        value = reason.get(name)
        numbers[f"finish_{name}"] = value if isinstance(value, int) else -1
    return numbers


def counts(payload: Any, n: int) -> dict[str, int]:
    """What the message counts for its request number n."""
    found = {name: _entry(payload, names, n) for name, names in _COUNTS.items()}
    details = _entry(payload, ("cached_tokens_details",), n) or {}  # of a request with nothing cached there are none
    found |= {f"cached_{tier}": details.get(tier) for tier in ("device", "host")}
    return {name: UNSAID if value is None else int(value) for name, value in found.items()}


def histogram(payload: Any, n: int) -> list[int] | None:
    """In how many rounds so many drafts were accepted, by how many; None: the message does not say."""
    found = _entry(payload, _HISTOGRAM, n)
    return None if found is None else list(found)


def decoded(payload: Any, n: int) -> list[int]:
    """The ids that the detokenizer goes on from: at first some of the prompt's as well."""
    return list(_entry(payload, ("decode_ids",), n) or ())


def _entry(payload: Any, names: tuple[str, ...], n: int) -> Any:
    """What the first field of these names that the message has holds for request n; None if there is none."""
    for name in names:
        values = getattr(payload, name, None)
        if values is not None and n < len(values):
            return values[n]
    return None
