"""Cases: as files of strangers, as the Python that makes them, made smaller, and drawn with requests that sample."""

import json
import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from msgspec.structs import replace

from eagletwin.cases.blocks import SearchConstraints, block_of
from eagletwin.cases.strategies import Focus, cases
from eagletwin.harness.cli.main import run_command
from eagletwin.harness.commands.fuzz.shrinking import cuts, size, sizes
from eagletwin.harness.core.case import (
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
    encode_case,
    in_runs,
    pretty_case,
)
from eagletwin.harness.core.errors import InputError, run_guarded
from eagletwin.harness.core.patch import read_patch
from eagletwin.harness.families.valid import check_case, decode_case, read_case, read_trace

from ..rows import rows

# Case files come from strangers: for whatever is wrong with one there is one clear error, exit 128, and nothing is run.


GOOD: dict[str, Any] = {
    "name": "good",
    "model": "llama-tiny",
    "num_steps": 3,
    "requests": [{"id": "a", "prompt": [1, 2, 3], "max_new_tokens": 4}],
}


def changed(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def with_request(**fields: Any) -> bytes:
    return changed(requests=[{**GOOD["requests"][0], **fields}])


def with_settings(*, rejection_sampling: bool = False, deterministic: bool = False, **fields: Any) -> bytes:
    """A case whose request samples."""
    requests = [{**GOOD["requests"][0], "sampling": {}}]
    settings = {"rejection_sampling": rejection_sampling, "deterministic": deterministic}
    return changed(requests=requests, engine={"sglang": settings}, **fields)


BAD = {
    "not JSON": (b"{nope", "not JSON"),
    "empty": (b"", "not JSON"),
    "not UTF-8": (b'{"name": "\xff"}', "not JSON"),
    "a list": (b"[]", "Expected `object`"),
    "nested without end": (b"[" * 100_000, "not JSON"),
    "an unknown field": (changed(steps=3), "unknown field `steps`"),
    "an unknown field of a request": (with_request(temperature=1), "unknown field `temperature`"),
    "an unknown engine": (changed(engine={"tgi": {}}), "unknown field `tgi`"),
    "a key twice": (
        changed().replace(b'"num_steps": 3', b'"num_steps": 3, "num_steps": 4'),
        "the key 'num_steps' is given twice",
    ),
    "a key of a request twice": (changed().replace(b'"id": "a"', b'"id": "a", "id": "b"'), "the key 'id' is given twice"),
    "a missing field": (b'{"name": "x", "model": "llama-tiny"}', "missing required field"),
    "no requests": (changed(requests=[]), "requests"),
    "an empty prompt": (with_request(prompt=[]), "prompt"),
    "a negative length": (with_request(max_new_tokens=-1), "max_new_tokens"),
    "samples of a turn of a session": (with_request(n=2, session="s"), "is a turn of a session"),
    "samples of nothing": (with_request(n=2, max_new_tokens=0), "there would be nothing of which to have several"),
    "samples of a request that is aborted": (
        changed(requests=[{**GOOD["requests"][0], "n": 2}], events=[{"at": 1, "kind": "abort", "request": "a"}]),
        "eagletwin does not play that part",
    ),
    "samples with ids that are too long": (with_request(n=2, id="a" * 62), "no room in the id"),
    "samples whose id another request has": (
        changed(requests=[{**GOOD["requests"][0], "n": 2}, {**GOOD["requests"][0], "id": "a.1"}]),
        "two requests have the same id",
    ),
    "more samples than requests": (
        changed(requests=[{**GOOD["requests"][0], "id": name, "n": 16} for name in "abcd"]),
        "would be sent 68 requests",
    ),
    "no sample": (with_request(n=0), "Expected `int` >= 1"),
    "a request after itself": (with_request(after="a"), "it would wait for ever"),
    "a request after one with several ends": (
        changed(requests=[{**GOOD["requests"][0], "n": 2}, {**GOOD["requests"][0], "id": "b", "after": "a"}]),
        "another request comes after it",
    ),
    "a request that waits, and is aborted between steps": (
        changed(
            requests=[GOOD["requests"][0], {**GOOD["requests"][0], "id": "b", "after": "a"}],
            events=[{"at": 1, "kind": "abort", "request": "b"}],
        ),
        "SGLang ignores an abort of a request that was not handed in yet",
    ),
    "a negative token": (with_request(prompt=[-1]), "prompt"),
    "a token outside the vocabulary": (with_request(prompt=[96]), "token 96 is outside the vocabulary"),
    "a float where a whole number belongs": (changed(num_steps=2.5), "num_steps"),
    "a billion requests": (changed(requests=10**9), "requests"),
    "too many requests": (changed(requests=[{**GOOD["requests"][0], "id": f"r{n}"} for n in range(65)]), "requests"),
    "two requests of one id": (changed(requests=GOOD["requests"] * 2), "same id"),
    "num_steps 0": (changed(num_steps=0), "num_steps"),
    "num_steps 10**9": (changed(num_steps=10**9), "num_steps"),
    "topk 65": (changed(topk=65), "topk"),
    "a tree of one node": (changed(topk=2, num_draft_tokens=1), "num_draft_tokens"),
    "more nodes than a tree has": (changed(topk=2, num_draft_tokens=12), "num_draft_tokens"),
    "page_size 0": (changed(page_size=0), "page_size"),
    "a chunk that is not whole pages": (changed(page_size=4, chunked_prefill_size=6), "whole number of pages"),
    "a pool that is not whole pages": (
        changed(page_size=4, chunked_prefill_size=4, engine={"sglang": {"max_total_tokens": 250}}),
        "whole number of pages",
    ),
    "a temperature of 0": (with_request(sampling={"temperature": 0}), "temperature"),
    "no mass at all": (with_request(sampling={"top_p": 0}), "top_p"),
    "a way to sample that does not exist": (with_request(sampling={"typical_p": 0.1}), "unknown field `typical_p`"),
    "a min_p above 1": (with_request(sampling={"min_p": 1.1}), "min_p"),
    "min_p with hashed coins": (
        changed(
            requests=[{**GOOD["requests"][0], "sampling": {"min_p": 0.1, "seed": 1}}],
            engine={"sglang": {"deterministic": True}},
        ),
        "SGLang's sampler refuses the two",
    ),
    "a bias outside the vocabulary": (
        with_request(logit_bias=[{"token": 96, "value": 1}]),
        "token 96 is outside the vocabulary",
    ),
    "logprobs from behind the prompt": (with_request(logprobs={"start": 20}), "begin at its end"),
    "logprobs of a token outside the vocabulary": (with_request(logprobs={"tokens": [96]}), "from 0 on"),
    "a repetition penalty of 0": (with_request(penalties={"repetition": 0}), "repetition"),
    "mixed chunks of a plain draft model": (
        changed(model="llama-standalone", engine={"sglang": {"mixed_chunks": True}}),
        "switches it off for STANDALONE",
    ),
    "a mixed chunk that may be empty": (
        changed(
            requests=[{"id": name, "prompt": [5], "max_new_tokens": 1} for name in "abc"],
            chunks=[4, 2],
            chunked_prefill_size=4,
            page_size=1,
            engine={"sglang": {"mixed_chunks": True}},
        ),
        "chunks[1] is 2, less than the budget before: beside 2 requests that run its chunk may be empty",
    ),
    "mixed chunks of a budget that may be empty": (
        changed(
            requests=[{"id": name, "prompt": [5], "max_new_tokens": 1} for name in "abc"],
            chunks=[4],
            chunked_prefill_size=2,
            page_size=1,
            engine={"sglang": {"mixed_chunks": True}},
        ),
        "chunked_prefill_size is 2, less than the budget before",
    ),
    "pages of the host without a prefix cache": (
        changed(engine={"sglang": {"host_pages": 4}}),
        "there is nothing to keep",
    ),
    "pages of the host for states": (
        changed(model="qwen3-next-nextn", engine={"sglang": {"host_pages": 4, "radix_cache": True}}),
        "does not follow the states",
    ),
    "pages of the host for Step-3.5": (
        changed(model="step-3.5", engine={"sglang": {"host_pages": 4, "radix_cache": True}}),
        "switches its pool of windows off",
    ),
    "more tokens at least than at most": (with_request(min_new_tokens=500), "min_new_tokens 500"),
    "a grammar whose group has no end": (with_request(grammar={"rules": ["a(b"]}), "a group has no end"),
    "a grammar that repeats nothing": (with_request(grammar={"rules": ["*a"]}), "nothing comes before"),
    "a grammar with a word": (with_request(grammar={"rules": ["import os"]}), "rules"),
    "a grammar without a rule that it names": (with_request(grammar={"kind": "ebnf", "rules": ["aB"]}), "there is no rule B"),
    "a regular expression with rules": (with_request(grammar={"rules": ["a", "b"]}), "a regular expression with rules"),
    "a grammar that never ends": (with_request(grammar={"kind": "ebnf", "rules": ["aA"]}), "no text that ends"),
    "a rule that begins with itself": (with_request(grammar={"kind": "ebnf", "rules": ["Aa|b"]}), "begins with itself"),
    "an abort inside a step and before an iteration": (
        changed(events=[{"at": 2, "kind": "abort", "request": "a", "step": 1}]),
        "`step` is of an abort that comes inside a step",
    ),
    "a pause inside a step": (
        changed(events=[{"at": 0, "kind": "pause", "step": 1}]),
        "`step` is of an abort that comes inside a step",
    ),
    "an abort before a grammar is read": (
        changed(
            requests=[{**GOOD["requests"][0], "grammar": {"rules": ["a"]}}],
            events=[{"at": 0, "kind": "abort", "request": GOOD["requests"][0]["id"]}],
        ),
        "aborted before it is read",
    ),
    "two biases of one token": (with_request(logit_bias=[{"token": 5, "value": 1}] * 2), "for one token"),
    "a logit processor of a stranger": (with_request(processor={"kind": "import os"}), "processor"),
    "a seed that nothing reads": (with_request(sampling={"seed": 1}), "has a seed, and deterministic is false"),
    "a seed that is missing": (
        with_settings(deterministic=True),
        "has no seed, and deterministic is true",
    ),
    "rejection sampling of a tree": (with_settings(rejection_sampling=True, topk=2), "chains only"),
    "rejection sampling over two vocabularies": (
        with_settings(rejection_sampling=True, model="llama-eagle3"),
        "whose draft knows 64 tokens",
    ),
    "a request that the pool cannot hold": (
        changed(engine={"sglang": {"max_total_tokens": 64}}, requests=[{"id": "a", "prompt": [1], "max_new_tokens": 100}]),
        "the pool has 64",
    ),
    "a newer schema": (changed(schema=2), "reads up to 1"),
    "an impossible schema": (changed(schema=0), "does not exist"),
    "a path for a model": (changed(model="../../etc/passwd"), "model"),
    "a path for a name": (changed(name="../evil"), "name"),
    "a path for a request id": (with_request(id="/etc/passwd"), "id"),
    "a model that does not exist": (changed(model="llama-huge"), "no model recipe is called 'llama-huge'"),
    "an unknown feature": (changed(exercises=["magic"]), "'magic' is not known"),
}


@pytest.mark.parametrize("what", sorted(BAD))
def test_a_bad_case_is_refused_with_cause_consequence_and_remedy(what: str) -> None:
    data, cause = BAD[what]
    with pytest.raises(InputError) as error:
        decode_case(data, "bad.json")
    message = str(error.value)
    assert "bad.json" in message
    assert cause in message
    assert "so:  nothing was run" in message
    assert "try:" in message
    assert error.value.exit_code == 128


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match="larger than"):
        read_case(huge)


@pytest.mark.parametrize("name", ["absent.json", "."])
def test_a_file_that_cannot_be_read_is_an_input_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError):
        read_case(tmp_path / name)


def test_a_case_survives_being_written_and_read() -> None:
    case = decode_case(changed(page_size=4, exercises=["batch"]), "x")
    assert decode_case(encode_case(case), "x") == case
    assert decode_case(pretty_case(case).encode(), "x") == case


def test_cases_of_one_configuration_share_it_and_others_do_not() -> None:
    case = decode_case(changed(), "x")
    other = Case(name="other", model="llama-tiny", num_steps=3, requests=(Request(id="z", prompt=(5,), max_new_tokens=1),))
    assert case.configuration() == other.configuration()
    assert case.configuration() != decode_case(changed(num_steps=2), "x").configuration()


def test_cases_that_sample_have_an_engine_of_their_own_whatever_their_coins() -> None:
    greedy, sampled = decode_case(changed(), "x"), decode_case(with_settings(), "x")
    assert greedy.configuration() != sampled.configuration()
    hot = with_request(sampling={"temperature": 2, "top_k": 5})
    assert decode_case(hot, "x").configuration() == sampled.configuration()
    other = changed(requests=[{**GOOD["requests"][0], "sampling": {}}], engine={"sglang": {"random_seed": 7}})
    assert decode_case(other, "x").configuration() == sampled.configuration()
    name = GOOD["requests"][0]["id"]
    assert decode_case(hot, "x").sampling_of(name) is not None
    assert (
        decode_case(with_request(sampling={"top_k": 1}), "x").sampling_of(name) is None
    )  # the one best: as SGLang sees it too


def test_the_command_ends_in_128_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_bytes(changed(num_steps=0))
    monkeypatch.chdir(tmp_path)
    assert run_guarded(lambda: run_command(["check", "bad.json", "--out", "runs"])) == 128
    said = capsys.readouterr().err
    assert "num_steps" in said
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["bad.json"]


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "case.json"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="it is no regular file"):
        read_case(pipe)
    with pytest.raises(InputError, match="it is no regular file"):
        read_patch(pipe)
    (tmp_path / "trace").mkdir()
    os.mkfifo(tmp_path / "trace" / "trace.json")
    with pytest.raises(InputError, match="it is no regular file"):
        read_trace(tmp_path / "trace")
    with pytest.raises(InputError, match="it is no regular file"):
        read_case(Path("/dev/zero"))


def test_what_a_shell_substitutes_for_a_file_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, changed())
    os.close(writing)
    try:
        assert read_case(Path(f"/dev/fd/{reading}")).name == "good"
    finally:
        os.close(reading)


def test_a_patch_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "patch.json"
    file.write_text('{"name": "x", "switches": ["trees-on-v2"], "switches": ["record-nothing"]}')
    with pytest.raises(InputError, match="the key 'switches' is given twice"):
        read_patch(file)


# A case is printed as the Python that makes it: what Hypothesis prints can be pasted into `@example(case=...)`.


NAMES = {type_.__name__: type_ for type_ in (Case, EngineSettings, Event, Request, Sampling, SGLangSettings)}
SMALL = Case(name="small", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(49, 53), max_new_tokens=1),))


@settings(max_examples=60, database=None, derandomize=True, deadline=None)
@given(case=cases() | cases(Focus(num_steps=3, topk=4, tree_size=2), sampling="any"))
def test_what_is_printed_makes_an_equal_case(case: Case) -> None:
    again = eval(repr(case), dict(NAMES))
    assert again == case
    assert encode_case(again) == encode_case(case)


def test_only_what_differs_from_the_defaults_is_printed() -> None:
    assert repr(SMALL) == (
        "Case(name='small', model='llama-tiny', requests=(Request(id='a', prompt=(49, 53), max_new_tokens=1),), num_steps=1)"
    )


def test_fields_are_spelled_as_in_json() -> None:
    for type_ in NAMES.values():
        assert type_.__struct_fields__ == type_.__struct_encode_fields__
    tree = Case(name="tree", model="llama-tiny", num_steps=2, topk=2, num_draft_tokens=5, requests=SMALL.requests)
    assert "num_draft_tokens=5" in repr(tree)


def test_a_chain_has_as_many_nodes_as_its_longest_path_and_says_nothing_of_them() -> None:
    assert (SMALL.num_draft_tokens, SMALL.verify_nodes) == (0, 2)


def test_many_equal_numbers_in_a_row_are_printed_short() -> None:
    case = replace(SMALL, chunks=(8, 4, *[8] * 108, 2, 2))
    assert "chunks=(8, 4) + (8,) * 108 + (2, 2)" in repr(case)
    assert eval(repr(case), dict(NAMES)) == case
    assert [in_runs(numbers) for numbers in ([], [3] * 5, (1, 1))] == ["[]", "[3] * 5", "(1, 1)"]


def test_a_saved_case_has_what_differs_from_the_defaults_and_its_schema() -> None:
    assert pretty_case(SMALL).splitlines() == [
        "{",
        ' "schema": 1,',
        ' "name": "small",',
        ' "model": "llama-tiny",',
        ' "requests": [',
        "  {",
        '   "id": "a",',
        '   "prompt": [49, 53],',
        '   "max_new_tokens": 1',
        "  }",
        " ],",
        ' "num_steps": 1',
        "}",
    ]


@settings(max_examples=60, database=None, derandomize=True, deadline=None)
@given(case=cases() | cases(Focus(num_steps=3, topk=4, tree_size=2), sampling="any"))
def test_a_saved_case_is_read_as_it_was(case: Case) -> None:
    assert decode_case(pretty_case(case).encode(), "x") == case


# Smaller cases made of any case: each is valid, and all together go down to the smallest there is.


def test_cuts_are_valid_and_lead_to_one_token() -> None:
    for number in (1, 5, 8):
        case = max(block_of(0, number, SearchConstraints()).cases(), key=size)
        for cut in cuts(case):
            check_case(cut, "cut")
            assert cut != case
        while smaller := next((cut for cut in cuts(case) if size(cut) < size(case)), None):
            case = smaller
        [request] = case.requests
        assert (len(request.prompt), case.events, case.chunks) == (1, (), ())
        assert request.max_new_tokens <= 1  # 0 is drawn, too
        assert (case.topk, case.num_steps, case.page_size) == (1, 1, 1)


def test_a_tree_becomes_a_chain_of_as_many_nodes_as_sglang_gives_it() -> None:
    """It takes no other number, and does not start."""
    request = Request(id="a", prompt=(7,), max_new_tokens=1)
    tree = Case(name="tree", model="llama-tiny", num_steps=3, topk=3, num_draft_tokens=6, requests=(request,))
    assert {cut.verify_nodes for cut in cuts(tree) if cut.topk == 1} == {4}


def test_a_chunk_and_the_prompt_that_it_cuts_get_shorter_together() -> None:
    """With either alone the last chunk would have another number of tokens than the one that the bug needs."""
    request = Request(id="a", prompt=(1, 2, 3, 4, 5, 6), max_new_tokens=1)
    case = Case(name="tail", model="llama-tiny", num_steps=1, chunks=(5,), requests=(request,))
    assert {(cut.chunks, cut.requests[0].prompt) for cut in cuts(case)} >= {((1,), (5, 6)), ((4,), (2, 3, 4, 5, 6))}


def test_an_abort_comes_in_an_earlier_step_or_not_at_all() -> None:
    request = Request(id="a", prompt=(7,), max_new_tokens=1)
    case = Case(name="abort", model="llama-tiny", num_steps=1, requests=(request,))
    found = {cut.events for cut in cuts(replace(case, events=(Event(at=0, kind="abort", request="a", step=5),)))}
    assert found >= {(), *((Event(at=0, kind="abort", request="a", step=step),) for step in (1, 4))}


def test_what_a_request_asks_for_is_taken_away_too() -> None:
    asks = {
        "stream": True,
        "logit_bias": (Bias(token=3, value=2.0),),
        "processor": Processor(),
        "penalties": Penalties(presence=2, repetition=1.3),
        "hidden_states": "last",
        "min_new_tokens": 1,
        "grammar": Grammar(kind="ebnf", rules=("aAb|cB|c", "b*")),
        "logprobs": Logprobs(start=0, top=2, tokens=(3,)),
        "sampling": Sampling(min_p=0.5),
    }
    for name, value in asks.items():
        request = replace(Request(id="a", prompt=(7,), max_new_tokens=1), **{name: value})
        case = Case(name="asks", model="llama-tiny", num_steps=1, requests=(request,))
        left = {getattr(cut.requests[0], name) for cut in cuts(case)}
        assert left - {value}, name
    [without] = [cut.requests[0] for cut in cuts(case) if cut.requests[0].sampling == Sampling()]  # min_p alone is taken away
    assert without.sampling is not None


def test_each_sampling_parameter_is_taken_away() -> None:
    sampling = Sampling(temperature=0.5, top_k=4, top_p=0.5, min_p=0.2)
    request = Request(id="a", prompt=(7,), max_new_tokens=1, sampling=sampling)
    found = {cut.requests[0].sampling for cut in cuts(Case(name="x", model="llama-tiny", num_steps=1, requests=(request,)))}
    assert found >= {
        replace(sampling, **{name: getattr(Sampling(), name)}) for name in ("temperature", "top_k", "top_p", "min_p")
    }


def test_many_equal_chunks_become_the_budget() -> None:
    request = Request(id="a", prompt=tuple(range(1, 60)), max_new_tokens=1)
    case = Case(name="x", model="llama-tiny", num_steps=1, chunks=(2, *[8] * 6), chunked_prefill_size=64, requests=(request,))
    assert ((2,), 8) in {(cut.chunks, cut.chunked_prefill_size) for cut in cuts(case)}
    few = replace(case, chunks=(2, 8, 8))
    assert {cut.chunked_prefill_size for cut in cuts(few)} == {64}


def test_a_smaller_model_is_smaller_whatever_the_names() -> None:
    """The name llama-tiny is longer than step-3.5."""
    request = Request(id="a", prompt=(7,), max_new_tokens=1)
    case = Case(name="x", model="step-3.5", num_steps=1, requests=(request,))
    plain = next(cut for cut in cuts(case) if cut.model == "llama-tiny")
    assert size(plain) < size(case)


def test_the_line_of_a_case_has_how_its_requests_sample() -> None:
    plain = Request(id="a", prompt=(7,), max_new_tokens=2)
    drawn = replace(plain, id="b", sampling=Sampling(temperature=0.5, top_k=4, top_p=0.25), n=2)
    any_way = replace(plain, id="c", sampling=Sampling())
    case = Case(name="x", model="llama-tiny", num_steps=1, chunks=(8,) * 110, requests=(plain, drawn, any_way))
    line = sizes(case)
    assert line.endswith("a 1+2, b 1+2 (2 samples, temperature 0.5, top_k 4, top_p 0.25), c 1+2 (sampled)")
    assert "chunks [8] * 110, " in line


# `cases(sampling=...)` draws valid cases that sample as they are asked to.


def drawn(focus: Focus | None, **asked: object) -> list[Case]:
    found: list[Case] = []

    @hypothesis.seed(1)
    @settings(max_examples=60, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(cases(focus, **asked))  # type: ignore[arg-type]
    def look(case: Case) -> None:
        check_case(case, "drawn")
        found.append(case)

    look()
    return found


def test_nothing_samples_unless_it_is_asked_for() -> None:
    assert not any(case.samples for case in drawn(None))


@pytest.mark.parametrize("focus", rows([None, Focus(num_steps=2, page_size=4)]))
def test_each_kind_of_sampling_is_drawn_where_it_is_asked_for(focus: Focus | None) -> None:
    for kind, rejection in (("target", {False}), ("rejection", {True})):
        found = drawn(focus, sampling=kind)
        assert all(case.samples for case in found)
        assert {case.engine.sglang.rejection_sampling for case in found} == rejection


def test_any_sampling_is_of_either_kind_where_both_are_possible() -> None:
    found = drawn(Focus(num_steps=2), sampling="any")
    assert all(case.samples for case in found)
    assert {case.engine.sglang.rejection_sampling for case in found} == {False, True}


def test_what_else_is_asked_for_holds() -> None:
    found = drawn(
        Focus(topk=4, context_length=16), held=("topk", "context_length"), sampling="target", events=False, max_requests=2
    )
    assert {(case.topk, case.engine.sglang.context_length) for case in found} == {(4, 16)}
    assert not any(case.events for case in found)
    assert {len(case.requests) for case in found} == {1, 2}


@pytest.mark.parametrize("focus", [Focus(topk=4), Focus(model="llama-eagle3")])
def test_rejection_sampling_of_what_cannot_have_it_is_refused(focus: Focus) -> None:
    with pytest.raises(ValueError, match="sampling='rejection' needs topk 1"):
        cases(focus, sampling="rejection")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="use one of target, rejection, any"):
        cases(sampling="all")  # type: ignore[arg-type]
