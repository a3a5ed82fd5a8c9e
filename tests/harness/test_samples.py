"""What the scheduler is sent for a request of which several answers are wanted."""

from hypothesis import given, settings
from msgspec.structs import replace

from eagletwin.cases.blocks import Asked, block_of
from eagletwin.cases.strategies import cases
from eagletwin.harness.commands.fuzz.shrinking import cuts
from eagletwin.harness.core.case import Case, EngineSettings, Penalties, Request, Sampling, SGLangSettings, encode_case
from eagletwin.harness.core.request_inputs import expanded
from eagletwin.harness.families.valid import check_case, decode_case

WANTED = Request(
    id="a",
    prompt=(1, 2, 3),
    max_new_tokens=4,
    min_new_tokens=2,
    arrive=5,
    stop=(7,),
    stream=True,
    sampling=Sampling(temperature=0.7),
    penalties=Penalties(presence=1.0),
    n=2,
)
CASE = Case(name="x", model="llama-tiny", num_steps=2, requests=(WANTED, Request(id="b", prompt=(9,), max_new_tokens=1)))


def test_a_request_of_no_new_tokens_comes_first_and_its_samples_are_all_that_was_asked() -> None:
    first, one, two, other = expanded(CASE).requests
    assert first == replace(WANTED, id="a.0", n=1, max_new_tokens=0, min_new_tokens=0, stream=False)
    assert [one, two] == [replace(WANTED, id=name, n=1, after="a.0") for name in ("a.1", "a.2")]
    assert other == CASE.requests[1]


def test_what_the_scheduler_is_sent_is_a_case_and_stays_as_it_is() -> None:
    sent = expanded(CASE)
    assert decode_case(encode_case(sent), "x") == sent
    assert expanded(sent) is sent
    assert sent.configuration() == CASE.configuration()


def test_plain_decode_is_not_asked_of_a_request_that_is_sent_nothing() -> None:
    greedy = replace(
        CASE,
        requests=(replace(WANTED, sampling=None),),
        engine=EngineSettings(sglang=SGLangSettings(plain_decode=True)),
    )
    assert expanded(greedy).told_plainly == ("a.1", "a.2")


def test_blocks_that_are_asked_for_samples_have_some_and_others_none() -> None:
    drawn = [case for number in range(6) for case in block_of(1, number, Asked(asks=("n",))).cases()]
    assert sum(any(request.n > 1 for request in case.requests) for case in drawn) > len(drawn) / 2
    without = [case for number in range(6) for case in block_of(1, number, Asked(asks=("stream",))).cases()]
    assert not any(request.n > 1 for case in without for request in case.requests)


def test_a_sample_may_be_aborted_inside_a_step_and_turns_of_sessions_have_none() -> None:
    aborted = [case for number in range(6) for case in block_of(1, number, Asked(asks=("n", "abort_in_step"))).cases()]
    names = {one.id for case in aborted for one in expanded(case).requests if one.after}
    assert {event.request for case in aborted for event in case.events if event.step} & names
    turns = [case for number in range(6) for case in block_of(1, number, Asked(asks=("n", "session"))).cases()]
    assert any(case.sessions for case in turns)
    assert any(request.n > 1 for case in turns for request in case.requests)
    assert not any(request.n > 1 and request.session for case in turns for request in case.requests)


def test_samples_that_may_not_be_retracted_have_room() -> None:
    blocks = [block_of(1, number, Asked(asks=("n",), retract=False)) for number in range(24)]
    pools = {block.sampling is None: set[int]() for block in blocks}
    for block in blocks:
        pools[block.sampling is None].add(block.focus.max_total_tokens)
    assert pools == {True: {64, 96, 128, 512}, False: {512}}


@given(cases(asks=("n", "abort_in_step")))
@settings(max_examples=12, deadline=None)
def test_generated_samples_are_valid_and_are_taken_away_one_by_one(case: Case) -> None:
    check_case(case, "x")
    check_case(expanded(case), "x")
    for request in case.requests:
        if request.n > 1:
            fewer = {
                one.n
                for smaller in cuts(replace(case, events=()))
                for one in smaller.requests
                if one == replace(request, n=one.n)
            }
            assert fewer >= set(range(1, request.n))
