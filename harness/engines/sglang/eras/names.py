"""Things that SGLang renamed or moved, under each of their names. The newest comes first.

Up to 0.5.12.post1 a worker is given a ModelWorkerBatch, which calls a chunk's place `extend_*`, and the next lengths lie in
the next draft input. Up to 0.5.11 the bonus token is the `verified_id`, and up to 0.5.10.post1 the links of a tree are
`retrive_*`.
"""

from typing import Any

from torch import Tensor


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
