"""Two traces compared number for number, without an engine."""

import hashlib
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.trace import HEADER, Recorder, Trace, new_header, write_trace
from eagletwin.harness.families.traces import strangers_trace
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.trace_diff import diff

CASE = LEDGER["25015"].case
ENGINE = EngineInfo(name="none", version="0", device="cpu", kernels="none", torch="0", triton="0")
NAN, INF = float("nan"), float("inf")


def of(values: Tensor) -> Trace:
    recorder = Recorder()
    recorder.add(CASE.requests[0].id, 0, "prefill", numbers={"end": 1}, tensors={"proposal_hidden": values})
    header = new_header(CASE, model_pair(CASE.model).digest, ENGINE, Ending(kind="finished"), recorder.records)
    return Trace(header, dict(recorder.tensors))


@pytest.mark.parametrize("values", [(NAN, 1.0), (NAN, NAN), (INF, -INF)])
def test_a_trace_is_the_same_as_itself_whatever_it_holds(values: tuple[float, ...]) -> None:
    result = diff(of(torch.tensor(values)), of(torch.tensor(values)))
    assert result.compared
    assert result.same
    assert not result.differences


@pytest.mark.parametrize(
    ("left", "right", "element"),
    [((NAN, 1.0), (NAN, 2.0), 1), ((NAN, 1.0), (1.0, 1.0), 0), ((INF, 1.0), (-INF, 1.0), 0)],
)
def test_what_differs_next_to_a_shared_nan_is_a_difference(
    left: tuple[float, ...], right: tuple[float, ...], element: int
) -> None:
    result = diff(of(torch.tensor(left)), of(torch.tensor(right)))
    assert not result.same
    assert result.differences[0].where.endswith(f"element {element}")


def test_a_nan_of_other_bits_is_another_number() -> None:
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert not diff(of(torch.tensor([NAN])), of(other)).same


def test_a_request_that_finished_without_a_record_of_its_work_has_no_verdict() -> None:
    recorder = Recorder()
    tokens = torch.tensor([*CASE.requests[0].prompt, 1])
    recorder.add(CASE.requests[0].id, 0, "finished", numbers={"aborted": 0, "dropped": 1}, tensors={"tokens": tokens})
    header = new_header(CASE, model_pair(CASE.model).digest, ENGINE, Ending(kind="finished"), recorder.records)
    verdict = judge(Trace(header, dict(recorder.tensors)))
    assert verdict.status == "unknown"
    assert verdict.reason.endswith("nothing was recorded")


def test_a_trace_of_a_stranger_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    """Whoever makes one seals it."""
    trace = of(torch.tensor([1.0]))
    write_trace(tmp_path, trace.header, trace.tensors)
    strangers_trace(tmp_path)
    file = tmp_path / HEADER
    seal = msgspec.json.decode(file.read_bytes())["sha256"].encode()
    text = file.read_bytes().replace(b'"schema":', b'"schema":1,"schema":', 1).replace(seal, b"")
    file.write_bytes(text.replace(b'"sha256":""', b'"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'"'))
    with pytest.raises(InputError, match="the key 'schema' is given twice"):
        strangers_trace(tmp_path)
