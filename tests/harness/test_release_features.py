"""What a release is told apart by is what it has, and what it has not is refused: with stand-ins for parts of SGLang."""

import dataclasses
import sys
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from eagletwin.harness.core.case import Request
from eagletwin.harness.engines.sglang.blame import NotDriven
from eagletwin.harness.engines.sglang.compat import requests, workers
from eagletwin.harness.engines.sglang.stand_ins import stubs


class _Scheduler:
    def __init__(self, server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, pp_rank: int, dp_rank: Any) -> None: ...


class _WithDefault:
    def __init__(self, server_args: Any, port_args: Any, gpu_id: int, clock: str = "wall", **more: Any) -> None: ...


class _WithAnotherRank:
    def __init__(self, server_args: Any, port_args: Any, gpu_id: int, spec_rank: int) -> None: ...


def test_a_rank_of_the_scheduler_that_is_not_known_is_refused_by_name() -> None:
    assert workers.ranks_of(_Scheduler, 1) == {"gpu_id": 1, "tp_rank": 1, "pp_rank": 0, "dp_rank": None}
    assert workers.ranks_of(_WithDefault, 0) == {"gpu_id": 0}
    with pytest.raises(NotDriven, match="built with spec_rank, and"):
        workers.ranks_of(_WithAnotherRank, 0)


def _message(ids: Any, *left_out: str) -> type:
    names = ("rid", "sampling_params", "logprob_start_len", "top_logprobs_num", "stream")
    fields = [("input_ids", ids), *((name, Any) for name in names if name not in left_out)]
    return dataclasses.make_dataclass("TokenizedGenerateReqInput", fields)


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have SGLang's message for a request be this class."""

    def give(message: type) -> None:
        monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", SimpleNamespace(TokenizedGenerateReqInput=message))  # type: ignore[arg-type]

    sampling = SimpleNamespace(SamplingParams=lambda **_: SimpleNamespace(normalize=lambda _: None))
    monkeypatch.setitem(sys.modules, "sglang.srt.sampling.sampling_params", sampling)  # type: ignore[arg-type]
    return give


REQUEST = Request(id="a", prompt=(1, 2), max_new_tokens=1)


def test_what_a_request_asks_for_and_a_message_has_no_field_for_is_refused_by_name(give: Any) -> None:
    streams = Request(id="a", prompt=(1, 2), max_new_tokens=1, stream=True)
    give(_message(list[int], "stream"))
    assert not hasattr(requests.tokenized(REQUEST, 90), "stream")  # nor is it asked for
    with pytest.raises(NotDriven, match="request 'a': a request of this release has no stream"):
        requests.tokenized(streams, 90)
    give(_message(list[int]))
    assert requests.tokenized(streams, 90).stream


@pytest.mark.parametrize(("ids", "kind"), [(list[int], list), (array | None, array), ("Optional[array[int]]", array)])
def test_token_ids_are_of_the_kind_that_the_message_takes(give: Any, ids: Any, kind: type) -> None:
    give(_message(ids))
    assert type(requests.tokenized(REQUEST, 90).input_ids) is kind


def test_a_draft_that_reads_the_targets_rows_is_refused_where_its_class_has_the_stub_for_a_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever version the installed package has: a tree stands beside it."""
    monkeypatch.setattr(stubs, "stand_in_for_pretrained", lambda: None)
    stub = stubs.StubModule("transformers.modeling_utils").PreTrainedModel
    early, late = type("Model", (stub,), {}), type("Model", (stubs.KeptConfiguration,), {})
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.20"))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "a_model", SimpleNamespace(Model=late))  # type: ignore[arg-type]
    workers.refuse_frozen(("a_model",))
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.23"))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "a_model", SimpleNamespace(Model=early))  # type: ignore[arg-type]
    for modules in (("a_model",), ("no_model_of_this_name",)):
        with pytest.raises(NotDriven, match="a draft that reads the target's rows"):
            workers.refuse_frozen(modules)
