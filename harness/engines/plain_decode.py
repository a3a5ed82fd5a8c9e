"""Plain decode of the same engine, as a second oracle: SGLang without speculative decoding, given each answer token by token.

The engine of a case with `plain_decode` has a second one beside it. When a case has run, the second is asked at each token of
each greedy request which it would have sent there, and its answers are added to the trace as records `plain`.
"""

from pathlib import Path

from msgspec import UNSET
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.differs import merge_differs
from eagletwin.harness.core.records import Header
from eagletwin.harness.core.trace import Trace, write_trace
from eagletwin.harness.families.valid import read_trace

# Edits that did nothing in a run of several engines or stages: those that none of them reached.


def of_both(one: Header, other: Header) -> Header:
    """The first header, with the edits of which both say that they were not reached, and the statements that either ran."""
    idle = tuple(name for name in one.idle_edits if name in other.idle_edits)
    unreached = [name for name in _unreached_edits(one) if _did_nothing(name, other)]
    unreached += [name for name in _unreached_edits(other) if name not in unreached and _did_nothing(name, one)]
    elsewhere = {change.patch: change for change in other.patched or ()}
    patched = [merge_differs([change, elsewhere.get(change.patch, change)]) for change in one.patched or ()]
    return replace(one, idle_edits=idle, unreached_edits=tuple(unreached) or UNSET, patched=tuple(patched) or UNSET)


def _unreached_edits(header: Header) -> tuple[str, ...]:
    return header.unreached_edits or ()


def _did_nothing(name: str, header: Header) -> bool:
    return name in _unreached_edits(header) or name.startswith(header.idle_edits)


FOLDER = "plain"  # of its trace and its log, in that of the case


def plain_case(case: Case, requests: tuple[Request, ...]) -> Case:
    """The case in its simplest form: nothing of drafts, no prefix cache, no events and no chunks, and no end of the context: a
    last round may send a token more than a prompt and its new tokens may have there, and each is asked for."""
    own = case.engine.sglang
    settings = SGLangSettings(
        max_running_requests=own.max_running_requests,
        max_total_tokens=own.max_total_tokens,
        max_loras_per_batch=own.max_loras_per_batch,
        lora_backend=own.lora_backend,
        grammar_backend=own.grammar_backend,
    )
    return Case(
        name=case.name,
        model=case.model,
        requests=requests,
        num_steps=1,
        page_size=case.page_size,
        chunked_prefill_size=case.chunked_prefill_size,
        engine=EngineSettings(sglang=settings),
    )


def plain_request(request: Request, count: int) -> Request:
    """The request of a plain case that is sent `count` tokens."""
    return replace(
        request,
        max_new_tokens=count,
        min_new_tokens=min(request.min_new_tokens, count),
        sampling=None,
        stream=False,
        logprobs=None,
        hidden_states="",
        session="",
        after="",
    )


def plain_configuration(case: Case) -> Case:
    """What the second engine of a case is built for."""
    configuration = case.configuration()
    requests = tuple(plain_request(request, request.max_new_tokens) for request in configuration.requests)
    return plain_case(configuration, requests).configuration()


def answers(trace: Trace) -> dict[str, tuple[int, ...]]:
    """What each request was sent of which plain decode is asked; not of one that was sent nothing."""
    case, found = trace.header.case, dict[str, tuple[int, ...]]()
    asked = case.told_plainly
    for number, record in enumerate(trace.header.records):
        if record.stage == "finished" and record.request in asked and trace.integers(number, "tokens"):
            found[record.request] = tuple(trace.integers(number, "tokens"))
    return found


def asked_case(case: Case, sent: dict[str, tuple[int, ...]]) -> Case:
    """The case of these answers, for the second engine."""
    of = tuple(plain_request(request, len(sent[request.id])) for request in case.requests if request.id in sent)
    return plain_case(case, of)


def with_answers(trace: Trace, plain: Trace, folder: Path) -> Trace:
    """The trace in this folder, written again with what plain decode said. If that did not finish, the case did not, either."""
    header, tensors = trace.header, dict(trace.tensors)
    ends = {record.request: record.iteration for record in header.records if record.stage == "finished"}
    records = list(header.records)
    for number, record in enumerate(plain.header.records):
        if record.stage == "plain":
            tensors[f"{len(records)}.tokens"] = plain.array(number, "tokens")
            records.append(replace(record, iteration=ends[record.request], forward=0))
    ended = plain.header.ending
    ending = header.ending if ended.kind == "finished" else replace(ended, detail=f"plain decode: {ended.detail}")
    write_trace(folder, replace(of_both(header, plain.header), records=tuple(records), ending=ending), tensors)
    return read_trace(folder)
