"""By what a case is compared with those of the ledger: a field is a part of it, or stands here with the reason why not."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check import known
from eagletwin.harness.check.known import KINDS, candidates, kind_of, may_be, may_be_another
from eagletwin.harness.core.case import (
    Adapter,
    Adaptive,
    Case,
    EngineSettings,
    Grammar,
    Logprobs,
    Penalties,
    Processor,
    Request,
    Sampling,
    SGLangSettings,
    Tier,
)
from eagletwin.harness.core.run_spec import DEFAULT_RUN

# A value of each field that makes a case another kind of case. Where one field alone does not, what stands beside it.
CHANGES: dict[str, tuple[object, dict[str, object]]] = {
    "Case.model": ("step-3.5", {}),
    "Case.requests": ((Request(id="a", prompt=(1,), max_new_tokens=1, stream=True),), {}),
    "Case.num_steps": (4, {"Case.num_draft_tokens": 4, "Case.topk": 2}),
    "Case.topk": (2, {}),
    "Case.num_draft_tokens": (2, {}),
    "Case.page_size": (4, {"SGLangSettings.mixed_chunks": True}),
    "Case.engine": (EngineSettings(sglang=SGLangSettings(rejection_sampling=True)), {}),
    "Request.sampling": (Sampling(), {}),
    "Request.stream": (True, {}),
    "Request.processor": (Processor(), {}),
    "Request.logprobs": (Logprobs(start=0), {}),
    "Request.penalties": (Penalties(presence=1.0), {}),
    "Request.hidden_states": ("last", {}),
    "Request.min_new_tokens": (1, {}),
    "Request.grammar": (Grammar(rules=("a*",)), {}),
    "Request.session": ("s", {}),
    "Request.adapter": (Adapter(), {"Request.session": "s"}),
    "Sampling.min_p": (0.5, {}),
    "Logprobs.start": (0, {}),
    "SGLangSettings.radix_cache": (True, {"SGLangSettings.mixed_chunks": True, "Case.page_size": 4}),
    "SGLangSettings.context_length": (64, {}),
    "SGLangSettings.rejection_sampling": (True, {}),
    "SGLangSettings.draft_window": (4, {}),
    "SGLangSettings.mixed_chunks": (True, {}),
    "SGLangSettings.host_pages": (4, {}),
    "SGLangSettings.adaptive": (Adaptive(tiers=(Tier(batch=1, steps=(1,)),)), {}),
    "SGLangSettings.plain_decode": (True, {}),
    "SGLangSettings.grammar_backend": ("llguidance", {"Request.grammar": Grammar(rules=("a*",))}),
    "EngineSettings.sglang": (SGLangSettings(rejection_sampling=True), {}),
}

_SIZE = "a size, or a moment: the search draws each, and no live bug needs one value of it"
_VALUE = "which value it has, where that it is there at all is a dimension"
_NONE = "no live bug that has a candidate fix needs it"
_TEXT = "a name, or what is said about the case"
IRRELEVANT: dict[str, str] = {
    **dict.fromkeys(("Case.schema", "Case.name", "Case.exercises", "Request.id"), _TEXT),
    **dict.fromkeys(("Case.chunked_prefill_size", "Case.chunks", "Case.events", "Request.prompt"), _SIZE),
    **dict.fromkeys(("Request.max_new_tokens", "Request.arrive", "Request.stop", "Request.n", "Request.after"), _SIZE),
    **dict.fromkeys(("SGLangSettings.max_running_requests", "SGLangSettings.max_total_tokens"), _SIZE),
    **dict.fromkeys(("Sampling.temperature", "Sampling.top_k", "Sampling.top_p", "Sampling.seed"), _VALUE),
    **dict.fromkeys(("Logprobs.top", "Logprobs.tokens", "Processor.kind", "Processor.seed"), _VALUE),
    **dict.fromkeys(("Penalties.frequency", "Penalties.presence", "Penalties.repetition"), _VALUE),
    **dict.fromkeys(("Grammar.kind", "Grammar.rules", "Adapter.seed", "Adapter.rank", "Adapter.on"), _VALUE),
    **{f"Adaptive.{name}": _VALUE for name in ("tiers", "alpha", "interval", "warmup", "up", "down", "ceiling")},
    **dict.fromkeys(("SGLangSettings.draft_sink", "SGLangSettings.host_policy", "SGLangSettings.random_seed"), _VALUE),
    **dict.fromkeys(("SGLangSettings.max_loras_per_batch", "SGLangSettings.lora_backend"), _VALUE),
    "Request.logit_bias": _NONE,
    "SGLangSettings.update_weights": _NONE,
    "SGLangSettings.accept_single": _NONE,
    "SGLangSettings.accept_acc": _NONE,
    "SGLangSettings.deterministic": _NONE,
}

STRUCTS = (Case, Request, Sampling, Processor, Logprobs, Penalties, Grammar, Adapter, EngineSettings, SGLangSettings, Adaptive)
FIELDS = [f"{struct.__name__}.{field.name}" for struct in STRUCTS for field in msgspec.structs.fields(struct)]


def _case(values: dict[str, object]) -> Case:
    """The plainest case with these values."""
    of: dict[str, dict[str, Any]] = {struct.__name__: {} for struct in STRUCTS}
    for name, value in values.items():
        struct, field = name.split(".")
        of[struct][field] = value
    request = {"id": "a", "prompt": (1, 2), "max_new_tokens": 2, **of["Request"]}
    for name, kind in (("sampling", Sampling), ("logprobs", Logprobs)):
        if of[kind.__name__]:
            request[name] = kind(**of[kind.__name__])
    engine = EngineSettings(sglang=SGLangSettings(**of["SGLangSettings"]))
    usual = {"name": "plain", "model": "llama-tiny", "num_steps": 2, "requests": (Request(**request),), "engine": engine}
    return Case(
        **{**usual, **of["Case"], **({"engine": EngineSettings(**of["EngineSettings"])} if of["EngineSettings"] else {})}
    )


def test_each_field_of_a_case_is_a_part_of_its_kind_or_has_a_reason_not_to_be() -> None:
    assert set(FIELDS) == CHANGES.keys() | IRRELEVANT.keys()
    assert not CHANGES.keys() & IRRELEVANT.keys()


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_that_counts_changes_the_kind(name: str) -> None:
    value, beside = CHANGES[name]
    struct = name.split(".")[0]
    plain: dict[str, object] = {"Sampling": {"Request.sampling": Sampling()}, "Logprobs": {"Request.logprobs": Logprobs()}}.get(
        struct, {}
    )
    assert kind_of(_case({**plain, **beside})) != kind_of(_case({**beside, name: value}))


def test_each_dimension_is_one_that_a_case_of_the_ledger_has_and_another_lacks() -> None:
    kinds = [kind_of(case) for entry in LEDGER.values() for case in (entry.case, *entry.also)]
    assert [name for name in KINDS if len({kind[name] for kind in kinds}) < 2] == []


HOST: Any = SimpleNamespace(source=SimpleNamespace(called="0.5.23"))


@pytest.mark.parametrize("rule", ["output.hidden", "engine.crash"])
def test_every_candidate_is_tried_however_many_there_are(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """A known bug whose fix is not tried would be called new."""
    case = LEDGER["25015"].case
    found = candidates(case, rule, DEFAULT_RUN, "0.5.23")
    assert len(found) > 4
    remedies = list(dict.fromkeys(entry.remedy for entry in found))
    last = next(entry for entry in found if entry.remedy == remedies[-1])
    tried = list[str]()

    def cures(_: object, entry: Any, *__: object) -> bool:
        tried.append(entry.id)
        return bool(entry.remedy == last.remedy)

    monkeypatch.setattr(known, "_cures", cures)
    assert may_be(HOST, case, rule, DEFAULT_RUN) == last.id
    assert len(tried) == len(remedies)  # each builds an engine
    assert may_be_another(HOST, found[0], case, rule, DEFAULT_RUN) == last.id
