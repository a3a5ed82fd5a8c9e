"""What became smaller while a case was shrunk, in words: `chunks 40 → 0, page_size 4 → 1`; and how large a case is."""

from collections.abc import Callable

from eagletwin.harness.core.case import Case, Request, in_runs, without_defaults
from eagletwin.harness.core.terminal import count


def _rules(request: Request) -> tuple[str, ...]:
    return () if request.grammar is None else request.grammar.rules


_MEASURES: tuple[tuple[str, Callable[[Case], object]], ...] = (
    ("model", lambda case: case.model),
    ("requests", lambda case: len(case.requests)),
    ("prompt tokens", lambda case: sum(len(request.prompt) for request in case.requests)),
    ("new tokens", lambda case: sum(request.max_new_tokens for request in case.requests)),
    ("chunks", lambda case: len(case.chunks)),
    ("events", lambda case: len(case.events)),
    ("num_steps", lambda case: case.num_steps),
    ("topk", lambda case: case.topk),
    ("nodes", lambda case: case.verify_nodes),
    ("page_size", lambda case: case.page_size),
    ("last arrival", lambda case: max(request.arrive for request in case.requests)),
    ("stop tokens", lambda case: sum(len(request.stop) for request in case.requests)),
    ("requests that sample", lambda case: sum(request.sampling is not None for request in case.requests)),
    ("requests that stream", lambda case: sum(request.stream for request in case.requests)),
    (
        "requests with min_p",
        lambda case: sum(request.sampling is not None and request.sampling.min_p > 0 for request in case.requests),
    ),
    ("biased tokens", lambda case: sum(len(request.logit_bias) for request in case.requests)),
    ("logit processors", lambda case: sum(request.processor is not None for request in case.requests)),
    ("requests with penalties", lambda case: sum(request.penalties is not None for request in case.requests)),
    ("requests with min_new_tokens", lambda case: sum(request.min_new_tokens > 0 for request in case.requests)),
    ("requests with a grammar", lambda case: sum(request.grammar is not None for request in case.requests)),
    ("letters of grammars", lambda case: sum(len(rule) for request in case.requests for rule in _rules(request))),
    ("backend of grammars", lambda case: case.engine.sglang.grammar_backend if case.constrains else "none"),
    ("requests with logprobs", lambda case: sum(request.logprobs is not None for request in case.requests)),
    ("requests with hidden states", lambda case: sum(bool(request.hidden_states) for request in case.requests)),
    ("requests with several samples", lambda case: sum(request.n > 1 for request in case.requests)),
    ("samples", lambda case: sum(request.n for request in case.requests if request.n > 1)),
    ("requests that wait for others", lambda case: sum(bool(request.after) for request in case.requests)),
    ("requests of sessions", lambda case: sum(bool(request.session) for request in case.requests)),
    ("requests with an adapter", lambda case: sum(request.adapter is not None for request in case.requests)),
    ("adapters", lambda case: len(case.adapters)),
    ("adaptive steps", lambda case: "off" if case.engine.sglang.adaptive is None else "on"),
    ("plain decode", lambda case: "on" if case.engine.sglang.plain_decode else "off"),
    ("radix cache", lambda case: "on" if case.engine.sglang.radix_cache else "off"),
)


def smaller(found: Case, now: Case) -> str:
    """How a case differs from the one that was found, by its sizes; empty if by none of them."""
    changes = [(name, measure(found), measure(now)) for name, measure in _MEASURES]
    return ", ".join(f"{name} {before} → {after}" for name, before, after in changes if before != after)


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
