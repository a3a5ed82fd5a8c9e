"""How far apart two types are: rows and choices are compared where both engines had seen the same tokens, and nowhere else."""

import torch

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.trace import Recorder, Trace, new_header
from eagletwin.harness.families.weights import model_pair

from .gpu.precision_gap import BIN, Apart, apart

DIGEST = model_pair("llama-tiny").digest


def trace(next_token: int, off: float, predicted: list[int]) -> Trace:
    """A prompt of two tokens, a round, and rows that are off by so much: the draft's by 100 where another token followed."""
    case = Case(name="apart", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1, 2), max_new_tokens=4),))
    recorder, wide = Recorder(), 0.0 if next_token == 5 else 100.0

    def kv(rows: list[int], part: str, off: float) -> dict[str, torch.Tensor]:
        return {f"{part}_rows": torch.tensor(rows), f"{part}_kv": torch.ones(len(rows), 2, 1, 1, 2) + off}

    recorder.add(
        "a",
        0,
        "prefill",
        numbers={"start": 0, "end": 2, "final": 1},
        tensors={
            **kv([0, 1], "target", off),
            **kv([0, 1], "draft", off + wide),
            "next_token": torch.tensor([next_token]),
            "proposal": torch.tensor([7]),
            "proposal_hidden": torch.ones(3) + off + wide,
        },
    )
    recorder.add("a", 0, "verify", numbers={"accept_len": len(predicted)}, tensors={"predicted": torch.tensor(predicted)})
    recorder.add("a", 0, "extend", tensors={**kv([2], "target", off), **kv([2], "draft", off), "proposal": torch.tensor([8])})
    recorder.add("a", 0, "finished", tensors={"tokens": torch.tensor([next_token, *predicted])})
    engine = EngineInfo(name="none", version="0", device="cpu", kernels="none", torch="0", triton="0")
    return Trace(
        new_header(case, DIGEST, engine, Ending(kind="finished"), recorder.records),
        dict(recorder.tensors),
    )


def test_rows_are_compared_as_long_as_the_tokens_are_the_same() -> None:
    found = apart(trace(5, 16 * BIN, [6, 9]), trace(5, 0.0, [6, 9]))
    assert {kind: sum(rows.bins.values()) for kind, rows in found.rows.items()} == {
        "target.kv": 3,
        "draft.kv": 3,
        "draft.hidden": 1,
    }
    assert all(rows.largest == 16 * BIN for rows in found.rows.values())
    assert found.rows["target.kv"].quantile(0.5) == 16.5 * BIN
    assert (found.decided, found.proposed, found.requests, found.tokens) == ((2, 0), (2, 0), (1, 0), (3, 3))
    assert (found.rounds, found.accepted) == ((1, 1), (2, 2))


def test_behind_another_token_only_what_came_before_it_is() -> None:
    found = apart(trace(5, BIN, [6, 9]), trace(4, 0.0, [6]))
    assert {kind: sum(rows.bins.values()) for kind, rows in found.rows.items()} == {"target.kv": 2}
    assert (found.decided, found.proposed) == ((1, 1), (0, 0))
    assert (found.requests, found.tokens, found.accepted) == ((1, 1), (2, 0), (2, 1))


def test_sums_are_of_all_cases() -> None:
    one = apart(trace(5, BIN, [6, 9]), trace(5, 0.0, [6, 9]))
    other = apart(trace(5, 4 * BIN, [6]), trace(5, 0.0, [7]))
    total = one + other + Apart()
    assert total.rows["target.kv"].bins == {1: 3, 4: 2}
    assert total.rows["target.kv"].largest == 4 * BIN
    assert (total.decided, total.rounds) == ((4, 1), (2, 2))
