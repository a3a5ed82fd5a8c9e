"""Adapters (LoRA) on the target: requests of one batch with different ones and with none, and what keeps their rows apart."""

import importlib.util
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Adapter, Adaptive, Case, EngineSettings, LoraBackend, Request, SGLangSettings, Tier
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.run_spec import Limits
from eagletwin.harness.families.valid import check_case
from eagletwin.harness.judge.judge import judge

from ..rows import long, spread
from .conftest import Runner
from .older import host_of

PROMPT = tuple((29 * i + 3) % 90 for i in range(10))
ONE, OTHER = Adapter(seed=1, rank=2), Adapter(seed=2, rank=8, on="mlp")
CASE = Case(
    name="adapters",
    model="llama-tiny",
    num_steps=3,
    requests=(
        Request(id="a", prompt=PROMPT, max_new_tokens=9, adapter=ONE),
        Request(id="b", prompt=PROMPT[:4], max_new_tokens=9, adapter=OTHER),
        Request(id="c", prompt=PROMPT[:7], max_new_tokens=9),
        Request(id="d", prompt=PROMPT, max_new_tokens=9, adapter=OTHER, arrive=3),
    ),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=512)),
    exercises=("several_adapters", "prompt_of_another_adapter", "batch_grows"),
)
TURNS = replace(
    CASE,
    engine=EngineSettings(sglang=replace(CASE.engine.sglang, max_loras_per_batch=1)),
    exercises=("adapters_take_turns", "prompt_of_another_adapter"),
)
AGAIN = replace(
    CASE,
    requests=(*CASE.requests[:3], replace(CASE.requests[0], id="e", arrive=25)),
    exercises=("several_adapters", "radix_hit"),
)
ANOTHER = replace(
    AGAIN,
    requests=(CASE.requests[0], replace(CASE.requests[3], arrive=25)),
    exercises=("prompt_of_another_adapter",),
)
MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
IDS = "lora_ids=[req.lora_id for req in batch.reqs]"
BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
LENGTHS = "sglang.srt.lora.utils.generate_sequence_lengths"
KEY = "sglang.srt.managers.schedule_batch.Req.__init__"
APART = ") + lora_id"
POOL = "sglang.srt.lora.mem_pool.LoRAMemoryPool.prepare_lora_batch"
SCALE = Edit(
    target=f"{MANAGER}.prepare_lora_batch", match="= lora.scaling", replacement="= lora.scaling * (1.0 + 0.5 * lora.config.r)"
)

# Fault -> its case, its edit, and the rule that names it first.
PLANTED: dict[str, tuple[Case, Edit, str]] = {
    "the scale of an adapter is another one": (CASE, SCALE, "target.kv"),
    "requests of a verify have each other's adapters": (
        CASE,
        Edit(
            target=BATCH,
            match=IDS,
            replacement="lora_ids=[r.lora_id for r in batch.reqs][:: -1 if batch.forward_mode.is_target_verify() else 1]",
        ),
        "target.kv",
    ),
    "the last request of a verify has no adapter": (
        CASE,
        Edit(
            target=BATCH,
            match=IDS,
            replacement="lora_ids=[r.lora_id for r in batch.reqs[:-1]] + "
            "[None if batch.forward_mode.is_target_verify() else batch.reqs[-1].lora_id]",
        ),
        "target.hidden",
    ),
    "a verify has an adapter for the first nodes of each request alone": (
        CASE,
        Edit(
            target=LENGTHS,
            match="fill_value=forward_batch.spec_info.draft_token_num,",
            replacement="fill_value=forward_batch.spec_info.draft_token_num - 1,",
        ),
        "target.kv",
    ),
    "an adapter is given a slot, and not loaded there": (
        replace(TURNS, requests=AGAIN.requests),
        Edit(
            target=POOL,
            match="self.load_lora_weight_to_buffer(",
            replacement="(lambda *given: None if uid in self.__dict__.setdefault('seen', set()) or self.seen.add(uid) "
            "else self.load_lora_weight_to_buffer(*given))(",
        ),
        "target.kv",
    ),
    "rows of one adapter are a hit of another": (
        ANOTHER,
        Edit(target=KEY, match=APART, replacement=") + lora_id[:0]"),
        "target.kv",
    ),
    "rows of an adapter are no hit of their own": (
        AGAIN,
        Edit(target=KEY, match=APART, replacement=") + lora_id + rid"),
        "radix.hit",
    ),
}


def kept(case: Case, backend: LoraBackend) -> Case:
    return replace(case, engine=EngineSettings(sglang=replace(case.engine.sglang, lora_backend=backend)))


@pytest.mark.parametrize("backend", spread(get_args(LoraBackend)))
def test_each_request_has_its_own_adapter_in_every_backend(run: Runner, backend: LoraBackend) -> None:
    case = kept(CASE, backend)
    _, verdict = run(case)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    _, verdict = run(case, SCALE)
    assert (verdict.status, verdict.rule) == ("diverged", "target.kv")


@pytest.mark.parametrize("model", ["llama-eagle3", "llama-mtp", *long("llama-gqa", "qwen3-eagle3.1")])
def test_adapters_of_other_models(run: Runner, model: str) -> None:
    _, verdict = run(
        replace(CASE, model=model, topk=1 if model == "llama-mtp" else 2, num_draft_tokens=0 if model == "llama-mtp" else 6)
    )
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)


@pytest.mark.long
def test_block_sizes_are_looked_for_by_a_name_that_a_cpu_has_in_older_releases_too(tmp_path: Path) -> None:
    with host_of("0.5.20") as host:
        verdict = judge(host.engine(CASE).run(CASE, tmp_path, Limits()))
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)


def test_more_adapters_than_a_batch_may_have_take_turns(run: Runner) -> None:
    _, verdict = run(TURNS)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    assert "several_adapters" not in verdict.exercised


def test_a_request_is_a_hit_of_rows_of_its_own_adapter(run: Runner) -> None:
    trace, verdict = run(AGAIN)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    starts = {one.request: one.numbers["start"] for one in trace.header.records if one.stage == "prefill"}
    assert (starts["b"], starts["c"]) == (0, 0)
    assert starts["e"] > 0


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][-1]))
def test_a_planted_fault_is_named_by_its_rule(run: Runner, fault: str) -> None:
    case, edit, rule = PLANTED[fault]
    _, verdict = run(replace(case, exercises=()), edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict.reason, verdict.first)


def test_a_cpus_mlp_is_wider_than_the_models_and_sglang_does_not_widen_an_adapter(run: Runner) -> None:
    """If this is red SGLang does, and eagletwin has no more to write adapters that are as wide."""
    narrow = Edit(
        target="eagletwin.harness.families.adapters.pad_adapter",
        match="found = dict(adapter)",
        replacement="return dict(adapter)",
    )
    _, verdict = run(replace(CASE, exercises=()), narrow)
    assert (verdict.status, verdict.rule) == ("unknown", "engine.crash")
    assert "does not match weight shape" in verdict.reason


@pytest.mark.parametrize(
    ("model", "adaptive", "because"),
    [
        ("llama-standalone", None, "STANDALONE"),
        ("gemma-4-assistant", None, "FROZEN_KV_MTP"),
        ("llama-tiny", Adaptive(tiers=(Tier(batch=1, steps=(1, 3)),)), "adaptive"),
        ("deepseek-nextn", None, "eagletwin"),
    ],
)
def test_what_no_engine_starts_with_is_refused(model: str, adaptive: Adaptive | None, because: str) -> None:
    case = replace(CASE, model=model, engine=EngineSettings(sglang=replace(CASE.engine.sglang, adaptive=adaptive)))
    with pytest.raises(InputError, match=because):
        check_case(case, "case")


def test_sglang_still_refuses_adapters_there() -> None:
    """If this is red SGLang has them with more, and `valid.py` is to admit it."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "srt" / "arg_groups" / "lora_hook.py").read_text()
    assert 'lora_spec_algorithms = ("EAGLE", "EAGLE3", "DFLASH", "DSPARK")' in source
    assert "cfg.speculative_adaptive,\n" in source
