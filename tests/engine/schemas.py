"""Traces as older schemas have them."""

from msgspec.structs import replace

from eagletwin.harness.core.trace import Trace


def as_of_schema_3(trace: Trace) -> Trace:
    """The same trace as it was recorded before logits were."""
    records = tuple(
        replace(record, tensors=tuple(name for name in record.tensors if name != "target_logits"))
        for record in trace.header.records
    )
    return Trace(replace(trace.header, schema=3, records=records), trace.tensors)
