"""Traces survive being written and read, and refuse, by name, to be read once they were damaged."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from eagletwin.harness.core import trace as module
from eagletwin.harness.core.arrays import changed_rows, counts_of, runs_of
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.trace import Recorder, new_header, write_trace
from eagletwin.harness.families.valid import read_trace
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.judge.judge import judge

DIGEST = model_pair("llama-tiny").digest
CASE = Case(name="x", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
ENGINE = EngineInfo(name="none", version="0", device="cpu", kernels="none", torch="0", triton="0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recorder = Recorder()
    buffer = torch.arange(4)
    recorder.add("a", 0, "prefill", step=2, numbers={"end": 3}, tensors={"table": buffer})
    buffer.zero_()  # a worker writes over its buffers: the record must hold what was there
    write_trace(
        tmp_path,
        new_header(CASE, DIGEST, ENGINE, Ending(kind="finished"), recorder.records),
        recorder.tensors,
    )
    return tmp_path


def reseal(folder: Path, **fields: Any) -> None:
    """Put these fields into trace.json, with a digest that is right."""
    file = folder / "trace.json"
    text = json.dumps({**json.loads(file.read_text()), **fields, "sha256": ""}, separators=(",", ":")).encode()
    file.write_bytes(module._insert_digest(text, hashlib.sha256(text).hexdigest()))


def test_a_trace_survives_being_written_and_read(folder: Path) -> None:
    trace = read_trace(folder)
    assert trace.header.case == CASE
    assert trace.header.records[0].key == ("a", 0, "prefill", 2, 0, 0)
    assert trace.tensor(0, "table").tolist() == [0, 1, 2, 3]
    assert sorted(path.name for path in folder.iterdir()) == ["trace.json", "trace.safetensors"]


def test_a_trace_without_tensors_can_be_read(tmp_path: Path) -> None:
    write_trace(tmp_path, new_header(CASE, DIGEST, ENGINE, Ending(kind="crashed", detail="early"), ()), {})
    assert read_trace(tmp_path).header.ending.detail == "early"


def test_tensors_are_read_as_safetensors_reads_them(tmp_path: Path) -> None:
    recorder = Recorder()
    tensors = {
        "0.bool": torch.tensor([True, False, True]),
        "0.byte": torch.arange(5, dtype=torch.uint8),
        "0.half": torch.randn(3, 1).half(),
        "0.brain": torch.randn(2, 2).bfloat16(),
        "0.empty": torch.zeros(2, 0, 4),
        "0.turned": torch.randn(3, 4).T,
        "0.scalar": torch.tensor(7.0, dtype=torch.float64),
        "1.int": torch.arange(3, dtype=torch.int32),
        "1.long": torch.arange(6).view(1, 2, 3),
    }
    for number in ("0", "1"):
        mine = {name[2:]: tensor for name, tensor in tensors.items() if name.startswith(number)}
        recorder.add("a", int(number), "prefill", tensors=mine)
    write_trace(tmp_path, new_header(CASE, DIGEST, ENGINE, Ending(kind="finished"), recorder.records), tensors)
    trace, flat = read_trace(tmp_path), load((tmp_path / "trace.safetensors").read_bytes())
    assert trace.tensors.keys() == tensors.keys()
    tensors["0.brain"] = tensors["0.brain"].float()  # whose every number float32 holds
    for name, tensor in tensors.items():
        number, _, part = name.partition(".")
        found = trace.tensor(int(number), part)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    assert flat.keys() == {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    assert flat["int64"].tolist() == [0, 1, 2, 3, 4, 5]
    assert flat["float32"].tolist() == [n for name in ("0.brain", "0.turned") for n in tensors[name].flatten().tolist()]


@pytest.mark.parametrize("slots", [[], [0], [3], [1, 2, 3], [1, 2, 2, 3, 7], [6, 5, 7, 5, 11]])
def test_runs_say_how_often_each_slot_is_listed(slots: list[int]) -> None:
    runs = runs_of(counts_of(np.array(slots, np.int64), 8))
    assert sorted(slots) == [first + n for first, length, times in runs.tolist() for n in range(length) for _ in range(times)]


@pytest.mark.parametrize(
    "fields",
    [
        {"dtypes": "", "shapes": []},
        {"shapes": []},
        {"dtypes": ""},
        {"dtypes": "int64 int64", "shapes": [[4], [4]]},
        {"dtypes": "int32"},
        {"shapes": [[5]]},
        {"shapes": [[2**31, 2**31, 2**31]]},
    ],
)
def test_a_header_that_names_other_tensors_than_there_are_is_refused(folder: Path, fields: dict[str, Any]) -> None:
    """Whatever its digest."""
    reseal(folder, **fields)
    with pytest.raises(InputError, match=r"not what trace\.json names"):
        read_trace(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"0",
        lambda data: b"",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data.replace(b'"I64"', b'"I63"'),
        lambda data: data.replace(b'"I64"', b'"I32"'),
        lambda data: data.replace(b'"shape":[4]', b'"shape":[3]'),
        lambda data: data.replace(b'"shape":[4]', b'"shape":4.0'),
        lambda data: data.replace(b"[0,32]", b"[4,36]"),
    ],
)
def test_what_is_not_safetensors_is_refused_whatever_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    data = save({"0.table": torch.arange(4)})
    assert damage(data) != data
    monkeypatch.setattr(module, "serialize", lambda _: damage(data))
    write_trace(tmp_path, new_header(CASE, DIGEST, ENGINE, Ending(kind="finished"), ()), {})
    with pytest.raises(InputError, match="not safetensors"):
        read_trace(tmp_path)


@pytest.mark.parametrize("name", ["trace.json", "trace.safetensors"])
@pytest.mark.parametrize("keep", [0, 10, -1])
def test_a_truncated_trace_is_refused_by_name(folder: Path, name: str, keep: int) -> None:
    file = folder / name
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InputError, match=name) as error:
        read_trace(folder)
    assert "was not judged" in str(error.value)


def test_an_edited_number_is_refused(folder: Path) -> None:
    file = folder / "trace.json"
    header = json.loads(file.read_text())
    header["records"][0]["numbers"]["end"] = 4
    file.write_text(json.dumps(header))
    with pytest.raises(InputError, match="edited"):
        read_trace(folder)


def test_an_edited_tensor_is_refused(folder: Path) -> None:
    file = folder / "trace.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(InputError, match="truncated or edited"):
        read_trace(folder)


@pytest.mark.parametrize("schema", [module.SCHEMA - 1, module.SCHEMA + 1])
def test_another_schema_is_refused(folder: Path, schema: int) -> None:
    file = folder / "trace.json"
    header = json.loads(file.read_text())
    file.write_text(json.dumps({**header, "schema": schema}))
    with pytest.raises(InputError, match=f"this eagletwin reads {module.SCHEMA}"):
        read_trace(folder)


def test_a_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path)


def test_a_trace_made_with_other_weights_is_refused(folder: Path) -> None:
    trace = read_trace(folder)
    trace.header = msgspec.structs.replace(trace.header, weights="0" * 64)
    with pytest.raises(InputError, match="other weights"):
        judge(trace)


def test_a_trace_that_makes_no_sense_is_unknown_and_never_equal(folder: Path) -> None:
    trace = read_trace(folder)  # one prefill record without the numbers and the tensors that it needs
    verdict = judge(trace)
    assert (verdict.status, verdict.reason) == ("unknown", "the trace is not complete: no start of a prefill record")
    whole = msgspec.structs.replace(trace.header.records[0], numbers={"start": 2, "end": 3, "final": 1})
    trace.header = msgspec.structs.replace(trace.header, records=(whole,))
    verdict = judge(trace)
    assert verdict.status == "unknown"
    assert "the judge failed" in verdict.reason


@pytest.mark.parametrize(("kind", "rule"), [("crashed", "engine.crash"), ("hung", "engine.hang")])
def test_a_run_that_did_not_finish_is_unknown_by_its_name(tmp_path: Path, kind: str, rule: str) -> None:
    ending = msgspec.convert({"kind": kind, "detail": "killed by SIGSEGV", "where": "verify, iteration 3"}, Ending)
    write_trace(tmp_path, new_header(CASE, DIGEST, ENGINE, ending, ()), {})
    verdict = judge(read_trace(tmp_path))
    assert (verdict.status, verdict.rule) == ("unknown", rule)
    assert "verify, iteration 3" in verdict.reason


@pytest.mark.parametrize(
    ("before", "changed"),
    [(None, [0, 1, 2]), ([[1, 1], [2, 2], [3, 3]], []), ([[1, 1], [2, 0], [3, 3], [4, 4]], [1]), ([[0, 1]], [0, 1, 2])],
)
def test_rows_that_are_new_or_not_as_they_were_are_recorded(before: list[list[int]] | None, changed: list[int]) -> None:
    now = np.array([[1, 1], [2, 2], [3, 3]])
    assert changed_rows(now, None if before is None else np.array(before)).tolist() == changed
