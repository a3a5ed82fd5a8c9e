"""A case is printed as the Python that makes it: what Hypothesis prints can be pasted into `@example(case=...)`."""

from hypothesis import given, settings
from msgspec.structs import replace

from eagletwin.cases.strategies import Focus, cases
from eagletwin.harness.core.case import (
    Case,
    EngineSettings,
    Event,
    Request,
    Sampling,
    SGLangSettings,
    encode_case,
    in_runs,
    pretty_case,
)
from eagletwin.harness.families.valid import decode_case

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
