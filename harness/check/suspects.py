"""Which bugs of the ledger a recording's divergence may be: named by what is known, as no recording can be run again."""

from collections.abc import Iterator

from eagletwin.cases.entry import Entry, Needs
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.records import Header, ServedModel
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.families import RECIPES

from .known import may_have


def suspects(trace: Trace, rule: str) -> list[Entry]:
    """Bugs that the server's SGLang may have, which break this rule with such a draft: of layers, plain, a tree; and which are
    there on its device, in its number of stages, and of a request that samples, where it takes one."""
    header = trace.header
    served = header.served
    if not isinstance(served, ServedModel):
        return []
    return [
        entry
        for entry in LEDGER.values()
        if entry.rule == rule
        and may_have(header.engine.version, entry)
        and (RECIPES[entry.case.model].mtp_layers > 0) == (served.mtp_layers > 0)
        and RECIPES[entry.case.model].reads_states == served.states
        and (entry.case.topk == 1 or header.case.topk > 1)
        and _has_what_it_needs(header, entry)
    ]


def _has_what_it_needs(header: Header, entry: Entry) -> bool:
    engine, needs = header.engine, entry.needs or Needs()
    samples = any(request.sampling is not None for request in header.case.requests)
    return (
        needs.device in ("", engine.device)
        and needs.pp <= engine.pp
        and (samples or any(request.sampling is None for request in entry.case.requests))
    )


def suspects_text(trace: Trace, rule: str) -> Iterator[str]:
    """The same as paragraphs."""
    version = trace.header.engine.version
    found = suspects(trace, rule)
    if not found:
        yield f"Of the ledger no bug that SGLang {version} may have breaks this rule with such a draft."
        return
    yield f"Of the ledger, SGLang {version} may have these, which break this rule with such a draft:"
    for entry in found:
        yield f"{entry.id}: {entry.trigger}. `eagletwin prove {entry.id}` shows it, and its candidate fix."
    yield "A recording cannot be run again, so whether it is one of them is not confirmed."
