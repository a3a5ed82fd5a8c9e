"""Which numbers a record must have. One that is absent is a tap that stopped, and never a reason to compare less.

Called by the judge before it compares anything. Traces up to schema 4 lack some of them, and are judged without.
"""

from eagletwin.harness.core.answers import COUNTS
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace

from .model import model_of

_POOL = ("total", "available", "evictable", "protected")
_OF_STAGE: dict[str, tuple[str, ...]] = {
    "iteration": (*_POOL, "live"),
    "flushed": (*_POOL, "live"),
    "prefill": ("start", "end", "final"),
    "draft": ("seq_len", "in_graph"),
    "verify": ("seq_len", "accept_len", "bonus", "new_seq_len"),
    "extend": ("seq_len", "in_graph"),
    "finished": ("aborted", "dropped"),
    "abort": ("launched", "read"),
    "fed": ("batch_size",),
    "copy": ("restore",),
}
# Absent of a request that was dropped from the queue, and of one for which nothing was sent, which output.tokens finds.
_OF_MESSAGE = (*COUNTS, "finish", "finish_matched", "finish_length")
_OF_TENSOR: dict[str, tuple[str, ...]] = {
    "window_free": tuple(f"window_{name}" for name in _POOL),
    "state_free": ("state_total", "state_given_up"),
}


def absent_number(trace: Trace) -> str:
    """What a record lacks, as a part of a sentence; empty if each has its numbers."""
    header = trace.header
    if not header.has_all_numbers or not model_of(header).numbers:
        return ""
    host = header.case.engine.sglang.host_pages > 0
    work = dict[int, set[str]]()  # iteration -> numbers by which its batch names the requests that it worked on
    for record in header.records:
        if record.stage in ("prefill", "verify"):
            work.setdefault(record.iteration, set()).add(f"request.{record.request}")
    owners = set[str]()  # the same of all requests so far: each batch names them
    for at, record in enumerate(header.records):
        due = _due(record, host)
        if record.stage == "finished" and _was_sent_something(trace, at):
            due += _OF_MESSAGE
        if record.stage == "batch":
            owners |= record.numbers.keys() | work.get(record.iteration, set())
            due = sorted(owners)
        if name := next((name for name in due if name not in record.numbers), ""):
            return f"no {name} of a {record.stage} record"
    return ""


def _was_sent_something(trace: Trace, at: int) -> bool:
    record = trace.header.records[at]
    return not record.numbers.get("dropped", 1) and "sent" in record.tensors and len(trace.array(at, "sent")) > 0


def _due(record: Record, host: bool) -> list[str]:
    stage, numbers = record.stage, record.numbers
    due = [
        *_OF_STAGE.get(stage, ()),
        *(name for tensor, names in _OF_TENSOR.items() if tensor in record.tensors for name in names),
    ]
    if stage == "prefill" and not numbers.get("final", 1):
        due.append("tokens")
    if stage == "session":
        due.append("opens" if record.request else "closes")
    if stage in ("iteration", "flushed") and host:
        due += ["copying", "host_total", "host_available"]
    return due
