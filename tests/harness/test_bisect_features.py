"""The features of a case: each can be taken away, and a valid case is left. Reduction on faults that a formula plants."""

from collections.abc import Callable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.strategies import cases
from eagletwin.harness.commands.bisect.command import _hint
from eagletwin.harness.commands.bisect.measure import FEATURES, Reduced, Reduction, features_of, reduce, variants
from eagletwin.harness.commands.bisect.report import feature_report
from eagletwin.harness.commands.bisect.state import Looked, Sighting, Subject
from eagletwin.harness.core.case import (
    Adapter,
    Adaptive,
    Bias,
    Case,
    EngineSettings,
    Event,
    Grammar,
    Logprobs,
    Penalties,
    Processor,
    Request,
    Sampling,
    SGLangSettings,
    Tier,
    encode_case,
)
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.families import RECIPES, runs_on
from eagletwin.harness.families.valid import decode_case

RICH = Case(
    name="rich",
    model="llama-gqa",
    num_steps=3,
    topk=2,
    num_draft_tokens=6,
    page_size=4,
    chunked_prefill_size=8,
    chunks=(4,),
    requests=(
        Request(id="a", prompt=tuple(range(20)), max_new_tokens=8, sampling=Sampling(seed=5), stream=True, logprobs=Logprobs()),
        Request(
            id="b",
            prompt=tuple(range(90, 110)),
            max_new_tokens=8,
            arrive=3,
            stop=(5, 100),
            logit_bias=(Bias(token=3, value=2.0),),
            processor=Processor(),
            penalties=Penalties(frequency=1.0),
            hidden_states="all",
            min_new_tokens=2,
            grammar=Grammar(rules=("(a|b)*",)),
        ),
    ),
    events=(
        Event(at=0, kind="abort", request="a", step=3),
        Event(at=2, kind="pause"),
        Event(at=3, kind="resume"),
        Event(at=4, kind="retract"),
        Event(at=5, kind="abort", request="b"),
        Event(at=6, kind="flush"),
    ),
    exercises=("chunked_prefill",),
    engine=EngineSettings(
        sglang=SGLangSettings(
            radix_cache=True,
            max_running_requests=1,
            max_total_tokens=128,
            context_length=64,
            update_weights="disk",
            deterministic=True,
            accept_single=0.5,
            accept_acc=0.5,
            draft_window=8,
            draft_sink=2,
            mixed_chunks=True,
            plain_decode=True,
            grammar_backend="llguidance",
            host_pages=16,
            host_policy="write_back",
        )
    ),
)
ADAPTIVE = Adaptive(tiers=(Tier(batch=1, steps=(1, 3)),))
# What only a chain can have, and what only coins that are drawn can.
REJECTION = replace(
    RICH.engine.sglang, rejection_sampling=True, accept_single=1.0, accept_acc=1.0, deterministic=False, adaptive=ADAPTIVE
)
RICH_CHAIN = replace(
    RICH,
    topk=1,
    num_draft_tokens=0,
    requests=(replace(RICH.requests[0], sampling=Sampling(min_p=0.1)), RICH.requests[1]),
    engine=replace(RICH.engine, sglang=REJECTION),
)
# What goes with no logprobs of a prompt and no hierarchical cache, and needs room for all sessions.
RICH_SESSION = replace(
    RICH,
    requests=tuple(
        replace(request, session="s", stream=False, grammar=None, hidden_states="", penalties=None, processor=None)
        for request in RICH.requests
    ),
    events=(*RICH.events, Event(at=9, kind="close", session="s")),
    engine=replace(
        RICH.engine,
        sglang=replace(RICH.engine.sglang, host_pages=0, host_policy="write_through", max_total_tokens=256, context_length=0),
    ),
)
# What goes with no abort of them, and no session.
RICH_SAMPLES = replace(
    RICH,
    requests=(*(replace(request, n=2) for request in RICH.requests), replace(RICH.requests[1], id="c", n=1)),
    events=tuple(event for event in RICH.events if not event.request),
)
RICH_WAITING = replace(
    RICH_SAMPLES,
    requests=(*(replace(one, n=1) for one in RICH_SAMPLES.requests[:2]), replace(RICH_SAMPLES.requests[2], after="a")),
)
# What goes with no adaptive steps.
RICH_ADAPTERS = replace(
    RICH,
    requests=tuple(replace(request, adapter=Adapter(seed=n)) for n, request in enumerate(RICH.requests)),
    engine=replace(
        RICH.engine, sglang=replace(RICH.engine.sglang, max_loras_per_batch=1, lora_backend="triton", update_weights="")
    ),
)
RICH_PRODUCTION = replace(
    RICH,
    engine=replace(
        RICH.engine,
        sglang=replace(RICH.engine.sglang, graphs=(1, 4), prefill_graphs=(16,), overlap=True, cuda_branches=True),
    ),
)
RICH_FLASH = replace(
    RICH,
    engine=replace(RICH.engine, sglang=replace(RICH.engine.sglang, attention_backend="fa3", draft_window=0, draft_sink=0)),
)
RICH_RANKS = replace(
    RICH,
    model="qwen3-moe-eagle3",
    requests=(RICH.requests[0], replace(RICH.requests[1], prompt=(95,), dp_rank=1)),
    engine=replace(RICH.engine, sglang=replace(RICH.engine.sglang, attn_dp_size=2, update_weights="", draft_sink=0)),
)
EVERYTHING = (
    *(RICH, RICH_RANKS, RICH_PRODUCTION, RICH_FLASH, RICH_CHAIN),
    *(RICH_SESSION, RICH_SAMPLES, RICH_WAITING, RICH_ADAPTERS),
)
BAD = Sighting(status="diverged", rule="draft.kv", place="somewhere")
GOOD = Sighting(status="equal")


def test_each_feature_of_a_case_can_be_taken_away_alone() -> None:
    names = {feature.words for rich in EVERYTHING for feature in features_of(rich)}
    models = {"chained layers", "multi-layer draft", "draft vocabulary", "plain draft model"}
    assert {feature.words for feature in FEATURES} - names == models
    for rich, feature in ((one, feature) for one in EVERYTHING for feature in features_of(one)):
        found = variants(rich, [feature])
        assert len(found) == (len(rich.requests) if feature.words == "several requests" else 1), feature.words
        assert not any(feature.has(case) for case in found), feature.words
        assert all(decode_case(encode_case(case), "x") == case for case in found)
        assert feature.says(rich)
        assert feature.plain


def test_without_its_features_a_case_is_the_plainest() -> None:
    for model in (name for name, recipe in RECIPES.items() if runs_on(recipe, "sglang")):
        rich = replace(RICH, model=model, engine=replace(RICH.engine, sglang=replace(RICH.engine.sglang, update_weights="")))
        for case in variants(rich, features_of(rich)):
            assert not features_of(case)
            assert (case.model, case.page_size, case.topk, case.num_steps) == ("llama-tiny", 1, 1, 1)
            assert len(case.requests) == 1


@given(cases(), st.data())
@settings(max_examples=50, deadline=None)
def test_a_generated_case_without_any_of_its_features_is_valid(case: Case, data: st.DataObject) -> None:
    had = features_of(case)
    gone = [feature for feature in had if data.draw(st.booleans())]
    found = variants(case, gone)
    assert found
    for way in found:
        assert decode_case(encode_case(way), "x") == way
        assert not any(feature.has(way) for feature in gone)


def test_no_field_of_a_case_is_forgotten() -> None:
    """A field that a later version of the form has must be a feature, or stand here."""
    plain = {"schema", "name", "model", "exercises", "engine", "id", "prompt", "max_new_tokens", "at", "kind", "request"}
    plain |= {"random_seed", "step"}
    changed = set()
    for rich, feature in ((one, feature) for one in EVERYTHING for feature in features_of(one)):
        for case in variants(rich, [feature]):
            pairs = [(rich, case), (rich.engine.sglang, case.engine.sglang)]
            pairs += [(old, new) for old in rich.requests for new in case.requests if new.id == old.id]
            changed |= {
                name for old, new in pairs for name in old.__struct_fields__ if getattr(old, name) != getattr(new, name)
            }
    fields = {name for form in (Case, Request, Event, SGLangSettings) for name in form.__struct_fields__}
    assert fields - plain <= changed
    assert set(EngineSettings.__struct_fields__) == {"sglang", "vllm"}


def reduced(shows: Callable[[Case], Sighting], case: Case = RICH, rule: str = "") -> tuple[Reduced, list[Case]]:
    asked: list[Case] = []

    def look(one: Case) -> Looked:
        asked.append(one)
        return Looked(version="x", sightings=(shows(one),) * 3)

    return reduce(case, rule, look, lambda text: None), asked


def test_exactly_what_a_fault_needs_is_found_and_each_of_it_is_checked() -> None:
    found, asked = reduced(lambda case: BAD if case.page_size > 1 and len(case.requests) > 1 else GOOD)
    assert [feature.words for feature in found.needed] == ["several requests", "pages"]
    assert found.doubts == {"several requests": "", "pages": ""}
    assert found.answered
    assert [feature.words for feature in features_of(found.least)] == ["several requests", "pages"]
    assert len(set(map(encode_case, asked))) == len(asked)
    without = [*variants(found.least, [found.needed[0]]), *variants(found.least, [found.needed[1]])]
    assert len(without) == 3
    assert all(case in asked for case in without)


def test_a_fault_that_needs_one_request_of_several_does_not_need_several() -> None:
    found, _ = reduced(lambda case: BAD if any(request.id == "b" for request in case.requests) else GOOD)
    assert found.needed == ()
    assert [request.id for request in found.least.requests] == ["b"]
    assert found.answered


def test_another_divergence_and_a_crash_are_reported_and_never_taken_for_equal() -> None:
    other = Sighting(status="diverged", rule="draft.slots", place="elsewhere")
    found, _ = reduced(lambda case: BAD if case.page_size > 1 else other)
    assert [feature.words for feature in found.needed] == ["pages"]
    assert "diverged otherwise, by draft.slots" in found.doubts["pages"]
    assert not found.answered
    found, _ = reduced(lambda case: BAD if case.page_size > 1 else Sighting(status="unknown", rule="engine.crash", why="boo"))
    assert found.doubts == {"pages": "boo"}
    assert not found.answered


def test_a_variant_that_never_calls_what_a_patch_edits_does_not_show_the_fault() -> None:
    vacuous = Sighting(status="unknown", why="the patch edits x, which was never called", vacuous=True)
    found, _ = reduced(lambda case: BAD if case.num_steps > 1 else vacuous)
    assert found.doubts == {"several steps": ""}
    assert found.answered


def test_a_case_that_shows_nothing_is_not_reduced() -> None:
    for shown, rule in ((GOOD, ""), (BAD, "draft.slots"), (Sighting(status="unknown", why="no"), "")):
        found, asked = reduced(lambda case, shown=shown: shown, rule=rule)  # type: ignore[misc]
        assert found.fault is None
        assert not found.answered
        assert asked == [RICH]


def test_the_report_names_what_is_needed_and_on_what_evidence() -> None:
    found, asked = reduced(lambda case: BAD if case.page_size > 1 and len(case.requests) > 1 else GOOD)
    control, interpreted = (Looked(version="x", sightings=(sighting,) * 3) for sighting in (GOOD, BAD))
    reduction = Reduction(found, control, interpreted, len(asked) + 2, 3 * len(asked) + 6, 12.34)
    report = feature_report(reduction, RICH, Path("runs"), "eagletwin check runs/smallest.json")
    words = " ".join(report.split())
    assert report.startswith("NEEDS several requests, pages  rich: draft.kv\n")
    assert "pages: page_size 4. Without it (page_size 1) the case is equal." in words
    assert "Does not need: larger model, late arrivals," in words
    assert "Without what was changed (--revert, --remedy, --patch) the smallest case is equal." in words
    assert "the smallest case shows it too: the fast kernel runtime has no part in it." in words
    doubtful = Reduction(found, interpreted, control, 1, 1, 0.0)
    words = " ".join(feature_report(doubtful, RICH, Path("runs"), "").split())
    assert "is diverged draft.kv at somewhere: so it is not, or not alone, what was changed." in words
    assert "is equal: what diverges is the fast kernel runtime, or what it makes of a kernel." in words
    assert "1 variant, run once, 0.0 s." in words


def test_where_nothing_shows_the_report_says_what_may_bring_it_back() -> None:
    found, _ = reduced(lambda _: GOOD)
    reduction = Reduction(found, None, None, 1, 3, 0.0)
    words = " ".join(feature_report(reduction, RICH, Path("runs"), "", "--revert 25015 undoes the fix.").split())
    assert words.startswith("NOTHING TO REDUCE")
    assert "choose one. --revert 25015 undoes the fix. 1 variant, run 3 times, 0.0 s." in words
    for name, patches, hint in (("25015", (), True), ("25015", (LEDGER["25015"].revert,), False), ("8409", (), False)):
        entry = LEDGER[name]
        subject = Subject(case=entry.case, run=RunSpec(patches=tuple(filter(None, patches))))
        assert bool(_hint(entry, subject)) == hint
    assert _hint(None, Subject(case=RICH)) == ""
