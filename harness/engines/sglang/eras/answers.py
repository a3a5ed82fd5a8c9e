"""What a message to the detokenizer says of a request, beside its tokens, under each of its names. The newest comes first.

The accepted drafts are `spec_accepted_tokens` up to 0.5.10.post1 and `spec_accepted_drafts` in 0.5.11, and their histogram is
`spec_acceptance_histogram` up to there. A field that a release does not have is recorded as UNSAID, and the judge says so.
"""

from typing import Any

from eagletwin.harness.core.records import UNSAID, Finish

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
