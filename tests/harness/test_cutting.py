"""Smaller cases made of any case: each is valid, and all together go down to the smallest there is."""

from msgspec.structs import replace

from eagletwin.cases.blocks import Asked, block_of
from eagletwin.harness.commands.fuzz.shrinking import cuts, size, sizes
from eagletwin.harness.core.case import Bias, Case, Event, Grammar, Logprobs, Penalties, Processor, Request, Sampling
from eagletwin.harness.families.valid import check_case


def test_cuts_are_valid_and_lead_to_one_token() -> None:
    for number in (1, 5, 8):
        case = max(block_of(0, number, Asked()).cases(), key=size)
        for cut in cuts(case):
            check_case(cut, "cut")
            assert cut != case
        while smaller := next((cut for cut in cuts(case) if size(cut) < size(case)), None):
            case = smaller
        [request] = case.requests
        assert (len(request.prompt), request.max_new_tokens, case.events, case.chunks) == (1, 1, (), ())
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
