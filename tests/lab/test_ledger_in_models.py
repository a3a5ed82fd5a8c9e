"""The ledger in other models: how a case is carried over, and the page that is made of what came out."""

from itertools import product
from pathlib import Path

import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.reach import cannot_be_in, on_a_cpu, port_entry, why_unreachable
from eagletwin.harness.commands.prove.command import _not_run
from eagletwin.harness.commands.prove.report import _LAYERS
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.valid import check_case

from ..rows import spread
from .models.report import PAGE, open_cells, page
from .models.survey import FILE, InModel, ModelCell, asked_of, attempt_of, case_in, due, proven_in, read, without_running, write

DOCS = Path(__file__).parents[2] / "docs/records"


def says(_: str, __: tuple[int, ...], count: int) -> list[int]:
    """Stands for the target: its answer to any prompt."""
    return list(range(40, 40 + count))


@pytest.mark.parametrize(
    ("name", "model"), spread(product(sorted(LEDGER), sorted(RECIPES)), lambda row: row[0], lambda row: row[1])
)
def test_a_case_is_carried_over_where_nothing_forbids_it(name: str, model: str) -> None:
    entry = LEDGER[name]
    if cannot_be_in(entry, model):
        return
    cases = [one.case for one in port_entry(entry, model, says)]
    assert cases
    assert len({case.requests for case in cases}) == len(cases)
    for case in cases:
        check_case(case, name)
        assert (case.model, case.num_steps, case.topk, case.engine) == (
            model,
            entry.case.num_steps,
            entry.case.topk,
            entry.case.engine,
        )
        for request, home in zip(case.requests, entry.case.requests, strict=True):
            assert len(set(request.prompt[: len(home.prompt)])) == len(
                set(home.prompt)
            )  # equal tokens stay equal, others differ


@pytest.mark.parametrize(
    ("entry", "model", "why"),
    [
        ("multi-layer-chunk-tail-2", "llama-tiny", "drafts of several layers"),
        ("standalone-shift", "llama-tiny", "language models of their own"),
        ("22088", "llama-mtp", "no second checkpoint"),
        ("small-tree", "llama-mtp", "num_draft_tokens 2"),
        ("indices-overflow", "mimo-v2", "has 4 layers"),
        ("tree-window", "llama-tiny", "sliding windows"),
        ("hybrid-keys", "llama-tiny", "keep a state"),
        ("25015", "deepseek-nextn", ""),
        ("25015", "llama-mtp", ""),
    ],
)
def test_why_a_bug_cannot_be_in_a_model(entry: str, model: str, why: str) -> None:
    found = cannot_be_in(LEDGER[entry], model)
    assert why in found
    assert bool(found) == bool(why)


def test_a_stop_token_is_the_last_but_one_that_the_target_says() -> None:
    for one in port_entry(LEDGER["33758"], "llama-gqa", says):
        [request] = one.case.requests
        assert request.stop == (40 + request.max_new_tokens - 2,)


def proven(name: str, **parts: object) -> ModelCell:
    entry = LEDGER[name]
    return ModelCell(asked=asked_of(entry), status="proven", rule=entry.rule, attempt=0, **parts)  # type: ignore[arg-type]


def test_the_page_has_a_word_for_each_cell_and_says_what_is_open(tmp_path: Path) -> None:
    entries = [LEDGER[name] for name in ("25015", "26329", "8409", "22088", "10846")]
    layers = InModel(
        model="llama-mtp",
        answers={
            "25015": ModelCell(
                asked=asked_of(entries[0]), status="not shown", idle=("sglang.x.Draft.draft_forward",), why="no"
            ),
            "26329": proven("26329", beside=("multi-layer-chunk-tail-2",)),
            "8409": ModelCell(asked=asked_of(entries[2]), status="not shown", why="both equal"),
            "22088": ModelCell(
                asked=asked_of(entries[3]), status="cannot be", why="there is no second checkpoint of llama-mtp"
            ),
            "10846": ModelCell(asked=asked_of(entries[4]), status="not run", why="it ended"),
        },
    )
    tiny = InModel(model="llama-tiny", answers={"25015": proven("25015")})
    text = page([layers, tiny], entries)
    assert "| 25015 | draft.positions | home llama-tiny; all else 1 |" in text
    assert "1. SGLang's worker for this draft never calls draft_forward" in text
    assert "| 26329 | draft.input_ids | (not run) llama-tiny; all else yes a |" in text
    assert "* a: beside the remedy of multi-layer-chunk-tail-2" in text
    assert "there is no second checkpoint of this model" in text
    known = {name for name in ("8409", "10846") if name in _LAYERS}
    assert [name for name in open_cells([layers], entries) if name.split()[0] not in known] == [
        f"{name} in llama-mtp" for name in ("8409", "10846") if name not in known
    ]
    assert len(open_cells([tiny], entries)) == 4
    write(tmp_path, [layers, tiny])
    known = read(tmp_path)["llama-mtp"].answers
    assert all(known[name] == cell for name, cell in layers.answers.items() if cell.status != "cannot be")
    assert known["22088"] == without_running(LEDGER["22088"], "llama-mtp")  # worked out anew, and in no file
    assert "22088" not in (tmp_path / FILE).read_text()
    assert [entry.id for entry in proven_in(tmp_path, "llama-mtp")] == ["26329"]
    assert due(layers, entries, again=False) == []
    assert due(layers, entries, again=True) == entries
    assert due(tiny, entries, again=False) == entries[1:]


def test_what_no_cpu_reaches_is_not_run() -> None:
    cell = without_running(LEDGER["context-end-reads"], "llama-tiny")
    assert cell is not None
    assert (cell.status, "--device cuda" in cell.why) == ("cannot be", True)
    assert without_running(LEDGER["25015"], "llama-tiny") is None


def test_a_proof_that_is_known_not_to_show_is_told_so_and_no_proof_that_was_made_is_refused() -> None:
    """Else both sides are equal, and the release is suspected. A reason is of the installed release alone."""
    found = read(DOCS)
    for model in RECIPES:
        for name, answer in found[model].answers.items():
            if answer.status == "proven":
                assert not _not_run(LEDGER[name], model, RunSpec(mode=on_a_cpu(LEDGER[name]))), (name, model)
    why = "UNKNOWN  8409 does not show in mimo-v2-window: a draft of several layers has no draft decode"
    assert _not_run(LEDGER["8409"], "mimo-v2-window", DEFAULT_RUN).startswith(why)
    assert not _not_run(LEDGER["8409"], "mimo-v2-window", RunSpec(sglang="0.5.20"))


def test_a_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[]")
    with pytest.raises(InputError, match="remove the file"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["25015", "33758"])  # the second has a stop token that the target says
def test_the_case_of_a_proof_is_known_by_its_number(name: str) -> None:
    entry = LEDGER[name]
    cases = [case_in(entry, "llama-gqa", number) for number in (0, 7)]
    assert cases[0] != cases[1]
    assert [attempt_of(entry, case) for case in cases] == [0, 7]


def test_the_page_in_the_docs_is_what_was_proven_and_nothing_is_open() -> None:
    found = list(read(DOCS).values())
    entries = list(LEDGER.values())
    assert not open_cells(found, entries)
    assert all(one.answers[entry.id].asked == asked_of(entry) for one in found for entry in entries)
    assert (DOCS / PAGE).read_text() == page(found, entries)
    for entry in entries:
        home = next(one for one in found if one.model == entry.case.model).answers[entry.id]
        assert home.status == ("cannot be" if why_unreachable(entry, on_a_cpu(entry)) else "proven"), entry.id
