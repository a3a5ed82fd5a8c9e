"""A case's events as the messages that SGLang takes from its tokenizer process."""

from typing import Any

from eagletwin.harness.core.case import Event


def messages(event: Event, paused: bool) -> list[Any]:
    """paused: whether the scheduler is, before the event."""
    from sglang.srt.managers import io_struct

    if event.kind == "abort":
        # SGLang ignores an abort of a request it does not know, so one that has not arrived yet is not aborted
        return [io_struct.AbortReq(rid=event.request)]
    if event.kind == "flush":
        return [io_struct.FlushCacheReqInput()]
    if event.kind == "retract":
        pause = io_struct.PauseGenerationReqInput(mode="retract")
        return [pause] if paused else [pause, io_struct.ContinueGenerationReqInput()]
    if event.kind == "pause":
        return [io_struct.PauseGenerationReqInput(mode="in_place")]
    return [io_struct.ContinueGenerationReqInput()]


def pauses(event: Event, paused: bool) -> bool:
    """Whether the scheduler is paused after the event."""
    return event.kind == "pause" if event.kind in ("pause", "resume") else paused
