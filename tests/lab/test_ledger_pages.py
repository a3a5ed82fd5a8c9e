"""The pages of the ledger, on every release and in every model, and what their cells are made of."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

from eagletwin.cases.ledger import LEDGER, PROBES, with_probes
from eagletwin.cases.reach import cannot_be_in, on_a_cpu, port_entry, why_unreachable
from eagletwin.harness.commands.prove.command import _not_run
from eagletwin.harness.commands.prove.report import reason
from eagletwin.harness.core.errors import EXIT_UNKNOWN, InputError
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.core.verdict import Divergence, Verdict
from eagletwin.harness.engines.provision import NotFetched, releases
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.valid import check_case
from eagletwin.harness.page.render import write_page

from ..rows import spread
from .__main__ import run
from .common import shared_rows
from .models.report import PAGE as MODELS_PAGE
from .models.report import open_cells
from .models.report import page as models_page
from .models.survey import FILE as MODELS_FILE
from .models.survey import ON_SGLANG, InModel, ModelCell, attempt_of, case_in, due, proven_in, without_running
from .models.survey import asked_of as asked_in_model
from .models.survey import read as read_models
from .models.survey import write as write_models
from .releases import survey
from .releases.command import releases as write_releases
from .releases.report import PAGE, empty, ledger_page, page
from .releases.survey import (
    COUNT,
    FILE,
    Cell,
    Measured,
    Output,
    asked_of,
    asked_output,
    cell_of,
    common_case,
    common_cases,
    differs,
    digest_of,
    fill,
    may_be_of_what_is_mended,
    plain_greedy,
    read,
    right_output,
    write,
)

# The ledger on every release: what a verdict makes of a cell, what is kept, and the page that is made of it.

NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
DOCS = Path(__file__).parents[2] / "docs/records"
ENTRIES = [LEDGER[name] for name in ("25015", "small-tree")]


def diverged(rule: str) -> Verdict:
    first = Divergence(
        rule=rule, request="a", round=0, stage="draft", step=1, iteration=0, index="row 1", expected="1", actual="2"
    )
    return Verdict(status="diverged", rule=rule, first=first)


def test_what_a_verdict_makes_of_a_cell() -> None:
    positions, tree = ENTRIES
    assert cell_of(positions, Verdict(status="equal")).status == "green"
    mine = cell_of(positions, diverged("draft.positions"))
    assert (mine.status, mine.rule, mine.own) == ("red", "draft.positions", True)
    other = cell_of(positions, diverged("draft.input_ids"))
    assert (other.status, other.own) == ("red", False)
    crash = Verdict(status="unknown", rule="engine.crash", reason="it ended")
    assert cell_of(tree, crash).status == "red"  # the worker's end is what the entry says
    cell = cell_of(positions, crash)
    assert (cell.status, cell.why) == ("cannot tell", "engine.crash: it ended")
    assert cell_of(positions, Verdict(status="unknown", reason="it did not reach draft_decode")).status == "cannot tell"


def test_an_end_of_the_worker_that_a_remedy_beside_may_make_is_no_bug_of_the_release() -> None:
    """Of a release that the entry clears. `26972` is fixed since 0.5.13; a remedy that did not fit ended 0.5.18 alike."""
    entry, remedy = LEDGER["26972"], LEDGER["standalone-shift"].remedy
    assert remedy is not None
    beside = dataclasses.replace(entry, beside={"0.5.12": remedy, "0.5.18": remedy})
    red = cell_of(entry, Verdict(status="unknown", rule="engine.crash", reason="it ended"))
    assert may_be_of_what_is_mended(beside, "0.5.12", red, "it ended") == red
    assert may_be_of_what_is_mended(entry, "0.5.18", red, "it ended") == red
    told = may_be_of_what_is_mended(beside, "0.5.18", red, "it ended")
    assert (told.status, "standalone-as-trained" in told.why) == ("cannot tell", True)


def test_a_cell_of_another_case_is_asked_again() -> None:
    assert len({asked_of(entry) for entry in LEDGER.values()}) == len(LEDGER)


def cell(**parts: object) -> Cell:
    return Cell(asked="this case", **parts)  # type: ignore[arg-type]


def two() -> list[Measured]:
    old = Measured(
        release="0.5.11",
        cells={
            "25015": cell(status="red", rule="draft.positions", own=True),
            "small-tree": cell(status="red", rule="draft.positions"),
        },
        output=Output(asked="these cases", tokens=("x", "y")),
    )
    new = Measured(
        release="0.5.12",
        cells={"25015": cell(status="green"), "small-tree": cell(status="cannot tell", why="SGLang refuses it")},
        output=Output(asked="these cases", tokens=("x", ""), why="common-1 crashed: it fell"),
    )
    return [old, new]


def test_the_page_has_a_word_for_each_cell_and_a_reason_for_each_doubt(tmp_path: Path) -> None:
    text = page(two(), ENTRIES, ["x", "y"])
    assert "| entry | breaks | on releases |" in text
    assert "| 25015 | draft.positions | 11 **red**; 12 green |" in text
    assert "| small-tree (live) | engine.crash | 11 red a; 12 ? 1 |" in text
    assert "* a: draft.positions (25015)\n" in text
    assert "1. SGLang refuses it\n" in text
    assert "| greedy output, 2 cases | | 11 2; 12 1 |" in text
    assert "0.5.12: 1 case did not finish: common-1 crashed: it fell" in text
    assert not empty(two(), ENTRIES)
    write(tmp_path, two())
    assert [read(tmp_path)[name] for name in ("0.5.11", "0.5.12")] == two()


def test_entries_of_the_same_answers_share_a_row_and_each_keeps_its_rule() -> None:
    positions, tree = ENTRIES
    chunk = LEDGER["26329"]
    assert list(shared_rows([(positions, "yes"), (chunk, "no"), (tree, "yes")])) == [
        "| 25015, small-tree (live) | draft.positions, engine.crash | yes |",
        "| 26329 | draft.input_ids | no |",
    ]
    assert list(shared_rows([(positions, "yes"), (positions, "yes")])) == ["| 25015, 25015 | draft.positions | yes |"]


@pytest.mark.parametrize("again", [False, True])
def test_what_was_measured_outlives_a_day_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """And what could not be asked on that day is asked on the next."""
    first, second = ENTRIES
    known = Measured(
        release="0.5.11",
        cells={first.id: Cell(asked=asked_of(first), status="green")},
        output=Output(asked=asked_output(common_cases()), tokens=("x",)),
    )
    write(tmp_path, [known])
    gone = NotFetched("0.5.11 could not be fetched", consequence="", remedy="")
    asked: list[list[str]] = []

    def hosts(names: Sequence[str]) -> Iterator[tuple[str, NotFetched]]:
        asked.append(list(names))
        yield from ((name, gone) for name in names)

    monkeypatch.setattr(survey, "hosts", hosts)
    for _ in range(2):
        fill(tmp_path, ["0.5.11"], ENTRIES, ENTRIES, common_cases(), again=again, say=lambda _: None)
        kept = read(tmp_path)["0.5.11"]
        assert (kept.cells[first.id], kept.output) == (known.cells[first.id], known.output)
        assert (kept.cells[second.id].status, kept.cells[second.id].why) == ("cannot tell", "0.5.11 could not be fetched")
    assert asked == [["0.5.11"]] * 2


def test_tables_of_other_models_are_written_outside_the_tracked_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = NotFetched("it could not be fetched", consequence="", remedy="")
    monkeypatch.setattr(survey, "hosts", lambda names: ((name, gone) for name in names))
    monkeypatch.setattr(survey, "right_output", lambda cases: ["x"] * len(cases))
    monkeypatch.chdir(tmp_path)
    assert write_releases(["0.5.12"], entries=["25015"], model="llama-gqa", records=DOCS) == EXIT_UNKNOWN
    assert [path.name for path in tmp_path.iterdir()] == ["build"]
    folder = tmp_path / "build" / "records" / "llama-gqa"
    assert read(folder)["0.5.12"].cells["25015"].why == "it could not be fetched"
    assert (folder / PAGE).read_text().startswith("# The ledger on every release, in llama-gqa")


def test_an_entry_that_no_cpu_reaches_asks_no_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = LEDGER["context-end-stores"]
    write(tmp_path, [Measured(release="0.5.12", output=Output(asked=asked_output(common_cases()), tokens=("x",)))])
    asked: list[str] = []
    monkeypatch.setattr(survey, "hosts", lambda names: iter([asked.extend(names)] * 0))
    found = fill(tmp_path, ["0.5.12"], [entry], [entry], common_cases(), again=True, say=lambda _: None)
    [shown] = [one.cells[entry.id] for one in found if one.release == "0.5.12"]
    assert (asked, shown.status, shown.asked) == ([], "cannot tell", asked_of(entry))
    assert "it needs --device cuda" in shown.why
    assert read(tmp_path)["0.5.12"].cells == {entry.id: shown}


def test_what_was_measured_of_another_case_is_not_shown_as_this_one_s(tmp_path: Path) -> None:
    first, second = ENTRIES
    cells = {first.id: Cell(asked="of another case", status="green"), second.id: Cell(asked=asked_of(second), status="green")}
    write(tmp_path, [Measured(release="0.5.12", cells=cells, output=Output(asked="of other cases", tokens=("x",)))])
    found = fill(tmp_path, [], ENTRIES, ENTRIES, common_cases(), again=False, say=lambda _: None)
    [shown] = [one for one in found if one.release == "0.5.12"]
    assert (list(shown.cells), shown.output) == ([second.id], None)
    assert "25015 on 0.5.12" in empty(found, ENTRIES)
    assert read(tmp_path)["0.5.12"].cells == cells


def test_a_hole_is_seen_and_another_output_is_no_success() -> None:
    measured = two()
    assert not differs(measured, ["x", "y"])  # a case that did not finish does not count as other output: the page says so
    assert differs(measured, ["x", "z"])
    assert "other tokens in cases 1." in page(measured, ENTRIES, ["x", "z"])
    del measured[1].cells["25015"]
    assert empty(measured, ENTRIES) == ["25015 on 0.5.12"]
    assert "(not measured)" in page(measured, ENTRIES, ["x", "y"])
    measured[1].cells["25015"] = Cell(asked="", status="cannot tell", why="0.5.12 could not be fetched")
    measured[1].output = Output(asked="", why="0.5.12 could not be fetched")
    assert empty(measured, ENTRIES) == ["25015 on 0.5.12", "greedy output on 0.5.12"]


def test_a_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    for line in ("[]", '{"entry": "25015", "of": ["0.5.12"], "answer": {"type": "cell", "asked": "x", "status": "blue"}}'):
        (tmp_path / FILE).write_text(line)
        with pytest.raises(InputError, match="remove the file"):
            read(tmp_path)
    assert read(tmp_path / "none")["0.5.11"] == Measured(release="0.5.11")


def test_a_reason_names_no_folder_and_no_line() -> None:
    """Else each machine and each release gives another one."""
    reason = (
        "x was called at /home/a/releases/0.5.13/sglang/srt/expert_location.py:576, and this engine\n has none (b.py:7 in c)"
    )
    cell = cell_of(ENTRIES[0], Verdict(status="unknown", reason=reason))
    assert cell.why == "x was called at sglang/srt/expert_location.py, and this engine has none (b.py in c)"


def test_the_common_cases_are_plain_and_differ() -> None:
    cases = [common_case(seed) for seed in range(COUNT)]
    assert len({case.requests for case in cases}) == COUNT == 100
    for case in cases:
        assert (case.topk, case.page_size, case.events, case.engine.sglang.radix_cache) == (1, 1, (), False)
    assert {case.num_steps for case in cases} == {1, 2, 3, 4}
    assert any(len(case.requests) == 3 for case in cases)
    assert any(case.chunked_prefill_size < len(case.requests[0].prompt) for case in cases)
    said = plain_greedy(cases[0])
    assert {name: len(tokens) for name, tokens in said.items()} == {
        request.id: request.max_new_tokens for request in cases[0].requests
    }
    assert digest_of(said) != digest_of(plain_greedy(cases[1]))


def test_every_fixed_entry_names_its_releases() -> None:
    known = releases()
    for entry in LEDGER.values():
        if entry.last_bad:
            assert known.index(entry.fixed) == known.index(entry.last_bad) + 1, entry.id
            assert entry.buggy.endswith(entry.last_bad)


def test_the_page_in_the_docs_is_what_was_measured_and_has_no_hole() -> None:
    found = list(read(DOCS).values())
    asked = {name for measured in found for name in measured.cells}
    entries = [entry for entry in (*LEDGER.values(), *PROBES.values()) if entry.id in asked]
    assert len(entries) >= 20
    assert not empty(found, entries)
    right = right_output(common_cases())
    assert (DOCS / PAGE).read_text() == page(found, entries, right)
    assert sum({cell.status for cell in measured.cells.values()} == {"cannot tell"} for measured in found) <= 3
    for measured in found:
        assert measured.output is not None
        assert list(measured.output.tokens) == right, measured.release
        assert all(cell.why for cell in measured.cells.values() if cell.status == "cannot tell")


def test_what_would_show_first_in_a_model_is_mended_beside_an_entry() -> None:
    """In gpt-oss trees break commit.path by tree-window first, the rule of 26997-kv."""
    entries = {entry.id: entry for entry in proven_in(DOCS, "gpt-oss-eagle3")}
    mended = entries["26997-kv"]
    remedy = LEDGER["tree-window"].remedy
    assert remedy is not None
    assert mended.beside["0.5.23"].edits == remedy.edits
    assert not entries["tree-window"].beside
    assert asked_of(mended) != asked_of(dataclasses.replace(mended, beside={}))
    shown = dataclasses.replace(mended, id="25015")
    text = page(two(), [shown, LEDGER["26997-bonus"]], ["x", "y"], "gpt-oss-eagle3")
    assert text.startswith("# The ledger on every release, in gpt-oss-eagle3")
    assert f"* {remedy.name}: 25015\n" in text
    assert "Not asked of any release yet: 26997-bonus." in text
    assert "python -m tests.lab releases --model gpt-oss-eagle3" in text
    assert "1 of 2 generated common cases" in text


def test_the_ledger_on_every_release_is_a_page_with_filters(tmp_path: Path) -> None:
    written = write_page(tmp_path, lambda: ledger_page(list(read(DOCS).values()), with_probes(["all"])))
    assert written is not None
    text = written.read_text(encoding="utf-8")
    for said in ("<option>red on 0.5.9</option>", "<option>live</option>", "row-overflow"):
        assert said in text


def test_a_cell_of_the_ledger_says_red_other_green_or_cannot_tell() -> None:
    [entry] = [entry for entry in with_probes(["all"]) if entry.id == "25015"]
    cells = [
        Cell(asked="x", status="red", rule=entry.rule, own=True),
        Cell(asked="x", status="red", rule="draft.kv"),
        Cell(asked="x", status="red", rule=entry.rule, own=True),  # 0.5.12 has the fix: another bug, by the same rule
        Cell(asked="x", status="green"),
        Cell(asked="x", status="cannot tell", why="it died"),
    ]
    measured = [Measured(release=f"0.5.{n}", cells={entry.id: cell}) for n, cell in enumerate(cells, 10)]
    page = ledger_page([*measured, Measured(release="0.5.15")], [entry])
    [row] = page.sections[0].tables[0].rows
    shown = [(cell.text, cell.kind) for cell in row.cells[5:]]
    other = [(f"other: {rule}", "doubt") for rule in ("draft.kv", entry.rule)]
    assert shown == [("red", "wrong"), *other, ("green", "right"), ("", "doubt"), ("", "")]
    assert row.tags == ("fixed", entry.rule, "red on 0.5.10", "red on 0.5.11", "red on 0.5.12", "green on 0.5.13")
    assert "it died" in str(page.sections[1].tables)


@pytest.mark.long
@pytest.mark.slow  # the reference answers the common cases
def test_a_table_with_a_release_that_could_not_be_fetched_has_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but one release are known, and that one is out of reach: an empty cache, and a pip that has nowhere to look."""
    known = read(DOCS)
    del known["0.5.10.post1"]
    write(tmp_path, known.values())
    for name, value in {"EAGLETWIN_CACHE": str(tmp_path / "cache"), **NO_INDEX}.items():
        monkeypatch.setenv(name, value)
    assert run(["releases", "0.5.10.post1", "--write", str(tmp_path)]) == EXIT_UNKNOWN
    said = capsys.readouterr()
    assert "0.5.10.post1 could not be fetched" in said.err
    assert "not measured: " in said.out


# The ledger in other models: how a case is carried over, and the page that is made of what came out.


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
    return ModelCell(asked=asked_in_model(entry), status="proven", rule=entry.rule, attempt=0, **parts)  # type: ignore[arg-type]


def test_the_page_has_a_word_for_each_cell_and_says_what_is_open(tmp_path: Path) -> None:
    entries = [LEDGER[name] for name in ("25015", "26329", "8409", "22088", "10846")]
    layers = InModel(
        model="llama-mtp",
        answers={
            "25015": ModelCell(
                asked=asked_in_model(entries[0]), status="not shown", idle=("sglang.x.Draft.draft_forward",), why="no"
            ),
            "26329": proven("26329", beside=("multi-layer-chunk-tail-2",)),
            "8409": ModelCell(asked=asked_in_model(entries[2]), status="not shown", why="both equal"),
            "22088": ModelCell(
                asked=asked_in_model(entries[3]), status="cannot be", why="there is no second checkpoint of llama-mtp"
            ),
            "10846": ModelCell(asked=asked_in_model(entries[4]), status="not run", why="it ended"),
        },
    )
    tiny = InModel(model="llama-tiny", answers={"25015": proven("25015")})
    text = models_page([layers, tiny], entries)
    assert "| 25015 | draft.positions | home llama-tiny; all else 1 |" in text
    assert "1. SGLang's worker for this draft never calls draft_forward" in text
    assert "| 26329 | draft.input_ids | (not run) llama-tiny; all else yes a |" in text
    assert "* a: beside the remedy of multi-layer-chunk-tail-2" in text
    assert "there is no second checkpoint of this model" in text
    known = {name for name in ("8409", "10846") if reason(name, "llama-mtp")}
    assert [name for name in open_cells([layers], entries) if name.split()[0] not in known] == [
        f"{name} in llama-mtp" for name in ("8409", "10846") if name not in known
    ]
    assert len(open_cells([tiny], entries)) == 4
    write_models(tmp_path, [layers, tiny])
    known = read_models(tmp_path)["llama-mtp"].answers
    assert all(known[name] == cell for name, cell in layers.answers.items() if cell.status != "cannot be")
    assert known["22088"] == without_running(LEDGER["22088"], "llama-mtp")  # worked out anew, and in no file
    assert "22088" not in (tmp_path / MODELS_FILE).read_text()
    assert [entry.id for entry in proven_in(tmp_path, "llama-mtp")] == ["26329"]
    assert due(layers, entries, again=False) == []
    assert due(layers, entries, again=True) == entries
    assert due(tiny, entries, again=False) == entries[1:]


def test_what_no_cpu_reaches_is_not_run() -> None:
    cell = without_running(LEDGER["context-end-stores"], "llama-tiny")
    assert cell is not None
    assert (cell.status, "--device cuda" in cell.why) == ("cannot be", True)
    assert without_running(LEDGER["25015"], "llama-tiny") is None


def test_a_proof_that_is_known_not_to_show_is_told_so_and_no_proof_that_was_made_is_refused() -> None:
    """Else both sides are equal, and the release is suspected. A reason is of the installed release alone."""
    found = read_models(DOCS)
    for model in ON_SGLANG:
        for name, answer in found[model].answers.items():
            if answer.status == "proven":
                assert not _not_run(LEDGER[name], model, RunSpec(mode=on_a_cpu(LEDGER[name]))), (name, model)
    why = "UNKNOWN  8409 does not show in mimo-v2-window: a draft of several layers has no draft decode"
    assert _not_run(LEDGER["8409"], "mimo-v2-window", DEFAULT_RUN).startswith(why)
    assert not _not_run(LEDGER["8409"], "mimo-v2-window", RunSpec(release="0.5.20"))


def test_a_file_of_models_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / MODELS_FILE).write_text("[]")
    with pytest.raises(InputError, match="remove the file"):
        read_models(tmp_path)


@pytest.mark.parametrize("name", ["25015", "33758"])  # the second has a stop token that the target says
def test_the_case_of_a_proof_is_known_by_its_number(name: str) -> None:
    entry = LEDGER[name]
    cases = [case_in(entry, "llama-gqa", number) for number in (0, 7)]
    assert cases[0] != cases[1]
    assert [attempt_of(entry, case) for case in cases] == [0, 7]


def test_the_page_in_the_docs_is_what_was_proven_and_nothing_is_open() -> None:
    found = list(read_models(DOCS).values())
    entries = list(LEDGER.values())
    assert not open_cells(found, entries)
    assert all(one.answers[entry.id].asked == asked_in_model(entry) for one in found for entry in entries)
    assert (DOCS / MODELS_PAGE).read_text() == models_page(found, entries)
    for entry in entries:
        home = next(one for one in found if one.model == entry.case.model).answers[entry.id]
        assert home.status == ("cannot be" if why_unreachable(entry, on_a_cpu(entry)) else "proven"), entry.id
