"""Documents that repeat what the code says must say it right."""

import re
from inspect import signature
from pathlib import Path

import msgspec

from eagletwin.cases.strategies import VALUES, cases
from eagletwin.harness.check.argument import MOST_LINES, draw
from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, Sampling, SGLangSettings, VLLMSettings
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.dimensions import FEATURES
from eagletwin.harness.families.valid import decode_case
from eagletwin.harness.judge.features import PREDICATES
from eagletwin.harness.judge.rules import catalogue, rules_json
from eagletwin.harness.testing import plugin
from eagletwin.reference import layout, tree
from eagletwin.reference.sizes import count_candidates, reserved_slots

from . import dimension_pages, rules_page
from .test_tree_report import EXPANDED, SELECTED, WORKED, found

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"


def test_every_field_feature_and_recipe_is_documented() -> None:
    text = (DOCS / "reference/case.md").read_text()
    for struct, prefix in (
        (Case, ""),
        (Request, "requests[]."),
        (Sampling, "requests[].sampling."),
        (Event, "events[]."),
        (SGLangSettings, "engine.sglang."),
        (VLLMSettings, "engine.vllm."),
    ):
        for field in msgspec.structs.fields(struct):
            if field.name not in ("requests", "events", "engine"):
                assert f"`{prefix}{field.encode_name}`" in text, field.name
    assert [field.name for field in msgspec.structs.fields(EngineSettings)] == ["sglang", "vllm"]
    assert all(f"`{name}`" in text for name in RECIPES)


def test_readme_counts_the_recipes_and_the_bugs_that_are_ready_for_upstream() -> None:
    text = README.read_text(encoding="utf-8")
    assert f"| models | {len(RECIPES)} tiny synthetic recipes" in text
    assert f"| models | {len(RECIPES)} **tiny synthetic recipes" in (DOCS / "reference/coverage.md").read_text(encoding="utf-8")
    ready = sum(path.is_dir() for path in (DOCS / "findings").iterdir())
    assert f"\n  {ready} bugs have a report, a patch and a test " in text


def test_what_the_pytest_plugin_takes_is_documented() -> None:
    text = (DOCS / "guide/pytest.md").read_text()
    for name in VALUES:
        assert f"| `{name}` |" in text, name
    asked = text.partition("`cases(focus=None, ")[2].partition(")`")[0]
    assert all(f"{name}=" in asked for name in signature(cases).parameters if name != "focus")
    for option in re.findall(r'"(--eagletwin-[a-z-]+)",', Path(plugin.__file__).read_text()):
        assert f"| `{option}" in text, option
    for name in ("revert", "remedy", "patches", "kernels", "without", "idle_changes"):
        assert f"{name}=" in text.partition("The marker `eagletwin(")[2].partition("`")[0], name


def test_the_tables_of_rules_are_those_that_the_registry_renders() -> None:
    assert rules_page.PAGE.read_text(encoding="utf-8") == rules_page.page(), "python -m tests.harness.rules_page"
    rules = catalogue().values()
    assert {rule.of_layers.section for rule in rules if rule.of_layers} == {"3.7"}
    assert {rule.of_plain.section for rule in rules if rule.of_plain} == {"3.10"}


def test_programs_read_the_same_catalogue() -> None:
    told = {rule["name"]: rule for rule in msgspec.json.decode(rules_json())}
    assert list(told) == list(catalogue())
    for name, rule in catalogue().items():
        assert [told[name][key] for key in ("section", "sentence", "weights", "stages")] == [*rule[:3], list(rule.stages)]
        for key, says in (("of_layers", rule.of_layers), ("of_plain", rule.of_plain)):
            assert told[name].get(key) == (says and says._asdict())


def test_every_feature_that_is_documented_has_a_predicate() -> None:
    assert list(PREDICATES) == list(FEATURES)


def test_documents_say_what_the_dimensions_say() -> None:
    for file, page in dimension_pages.PAGES.items():
        text = file.read_text(encoding="utf-8")
        assert text == page(text), "run: python -m tests.harness.dimension_pages"


def test_the_example_is_a_valid_case() -> None:
    text = (DOCS / "reference/case.md").read_text()
    example = text.partition("```json\n")[2].partition("```")[0]
    assert decode_case(example.encode(), "docs/reference/case.md").exercises == ("chunked_prefill",)


def test_the_drawn_tree_is_what_a_report_draws() -> None:
    text = (DOCS / "explanation/trees.md").read_text()
    drawing = "\n".join(draw(WORKED, found("tree.tokens", "the final selection"))[2:])
    assert f"```\n{drawing}\n```" in text
    assert f"than {MOST_LINES} candidates" in text


def test_what_verification_is_given_is_what_follows_from_the_parents() -> None:
    text = (DOCS / "explanation/trees.md").read_text()
    parents = tree.tree_parents(SELECTED, 2, EXPANDED)
    first, sibling = tree.retrieve_links(parents)
    for node, depth in enumerate(tree.depths(parents)):
        seen = " ".join(str(other) for other in tree.ancestor_mask(parents)[node].nonzero().flatten().tolist())
        position = f"M + {depth}" if depth else "M"
        cells = (node, parents[node], position, seen, first[node], sibling[node])
        assert f"|{'|'.join(' ' if cell == -1 else f' {cell} ' for cell in cells)}|" in text


def test_the_sizes_of_trees_are_right() -> None:
    rows = [line.split("|")[1:-1] for line in (DOCS / "explanation/trees.md").read_text().split("\n") if line.count("|") == 10]
    sizes = [[int(cell) for cell in row[:8]] for row in rows if row[0].strip().isdigit()]
    assert len(sizes) == 7
    for topk, num_steps, nodes, candidates, proposing, *slots in sizes:
        assert candidates == count_candidates(topk, num_steps)
        assert nodes <= candidates + 1
        assert proposing == 1 + (num_steps - 1) * topk
        assert slots == [reserved_slots(topk, num_steps, page, nodes) for page in (1, 4, 16)]


def test_the_drawn_layout_is_where_the_rows_lie() -> None:
    text = (DOCS / "explanation/trees.md").read_text()
    for page, width, last in ((1, 11, 18), (4, 8, 31)):
        cells = dict.fromkeys(range(8, last + 1), ".") | dict.fromkeys((8, 9), "c")
        for step, columns in enumerate(layout.draft_columns(10, 3, 3, page).tolist(), 1):
            cells |= {column: f"{branch}.{step}" if step < 3 else "-" for branch, column in enumerate(columns)}
        cells |= dict.fromkeys(layout.hole_columns(10, 3, 3, page).flatten().tolist(), "h")
        for begin in range(8, last + 1, width):
            row = "".join(f"{cells[column]:>5}" for column in range(begin, begin + width))
            assert f"  columns {begin:2} .. {begin + width - 1}{row}\n" in text
