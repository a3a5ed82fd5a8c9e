"""What became smaller while a case was shrunk, in words: `chunks 40 → 0, page_size 4 → 1`; and how large a case is."""

from collections.abc import Callable

from eagletwin.harness.core.case import Case, Request, in_runs, without_defaults
from eagletwin.harness.core.terminal import count
from eagletwin.harness.families.dimensions import DIMENSIONS

# Of all cases; what only some have is measured by its dimension.
_MEASURES: dict[str, Callable[[Case], object]] = {
    "model": lambda case: case.model,
    "prompt tokens": lambda case: sum(len(request.prompt) for request in case.requests),
    "new tokens": lambda case: sum(request.max_new_tokens for request in case.requests),
    "events": lambda case: len(case.events),
    **{dimension.name: dimension.size for dimension in DIMENSIONS.values() if dimension.size is not None},
}


def smaller(found: Case, now: Case) -> str:
    """How a case differs from the one that was found, by its sizes; empty if by none of them."""
    changes = [(name, measure(found), measure(now)) for name, measure in _MEASURES.items()]
    return ", ".join(f"{name} {_said(before)} → {_said(after)}" for name, before, after in changes if before != after)


def _said(size: object) -> object:
    return {"True": "on", "False": "off"}.get(str(size), size)


def _size(request: Request) -> str:
    notes = [f"{request.n} samples"] if request.n > 1 else []
    if request.sampling is not None:
        chosen = without_defaults(request.sampling).items()
        notes += [f"{name} {value:g}" for name, value in chosen] or ["sampled"]
    return f"{request.id} {len(request.prompt)}+{request.max_new_tokens}" + (f" ({', '.join(notes)})" if notes else "")


def sizes(case: Case) -> str:
    """How large a case is, without what it has none of."""
    prompts = ", ".join(map(_size, case.requests))
    chunks = f"chunks {in_runs(list(case.chunks))}, " if case.chunks else ""
    return (
        f"{case.model}, num_steps {case.num_steps}, topk {case.topk}, page_size {case.page_size}, {chunks}"
        f"{count(len(case.events), 'event')}, requests (prompt+new) {prompts}"
    )
