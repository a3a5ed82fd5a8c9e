"""Streams whose copies wait for whoever waits for them."""

import torch

from eagletwin.harness.engines.sglang.stand_ins.late_copies import CopyEvent, CopyStream, stream, transfer_kv_direct


def _copies(target: torch.Tensor) -> tuple[CopyStream, list[CopyEvent]]:
    """Two copies in one stream, of rows 0 and 1, with an event behind each."""
    own, events, source = CopyStream(), [], torch.ones(4, 1)
    with stream(own):
        for row in (0, 1):
            transfer_kv_direct([source], [target], torch.tensor([row]), torch.tensor([row]), 1)
            events.append(own.record_event())
    return own, events


def test_who_asks_about_an_event_hurries_no_copy_behind_it() -> None:
    target = torch.zeros(4, 1)
    _, (first, second) = _copies(target)
    assert not first.query()
    assert first.query()
    assert target.flatten().tolist() == [1, 0, 0, 0]
    assert first.query()
    assert target.flatten().tolist() == [1, 0, 0, 0]
    second.synchronize()
    assert target.flatten().tolist() == [1, 1, 0, 0]


def test_a_stream_waits_for_the_place_that_an_event_had_when_it_was_told_to() -> None:
    target = torch.zeros(4, 1)
    own, (first, _) = _copies(target)
    other = CopyStream()
    first.wait(other)
    own.record_event(first)  # anew, behind both
    other.synchronize()
    assert target.flatten().tolist() == [1, 0, 0, 0]
