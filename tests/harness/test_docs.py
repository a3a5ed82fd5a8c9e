"""Documents that repeat what the code says must say it right."""

from pathlib import Path

import msgspec

from eagletwin.harness.bisect.features import FEATURES as TAKEN_AWAY
from eagletwin.harness.case import Case, EngineSettings, Event, Request, Sampling, SGLangSettings, decode_case
from eagletwin.harness.exercised import FEATURES
from eagletwin.harness.judge import LAYER_RULES, RULES
from eagletwin.harness.models.recipes import RECIPES
from eagletwin.harness.report.tree import MOST_LINES, draw
from eagletwin.reference import layout, tree
from eagletwin.reference.sizes import count_candidates, reserved

from .test_tree_report import EXPANDED, SELECTED, WORKED, found

DOCS = Path(__file__).parents[2] / "docs"


def test_every_field_feature_and_recipe_is_documented() -> None:
    text = (DOCS / "case.md").read_text()
    for struct, prefix in (
        (Case, ""),
        (Request, "requests[]."),
        (Sampling, "requests[].sampling."),
        (Event, "events[]."),
        (SGLangSettings, "engine.sglang."),
    ):
        for field in msgspec.structs.fields(struct):
            if field.name not in ("requests", "events", "engine"):
                assert f"`{prefix}{field.encode_name}`" in text, field.name
    assert [field.name for field in msgspec.structs.fields(EngineSettings)] == ["sglang"]
    for name, meaning in FEATURES.items():
        assert f"| `{name}` | {meaning} |" in text
    assert all(f"`{name}`" in text for name in RECIPES)


def test_every_rule_is_documented_word_for_word() -> None:
    text = (DOCS / "rules.md").read_text()
    for name, (section, sentence) in RULES.items():
        assert f"| `{name}` | {section} | {sentence} |" in text
    for name, (section, sentence) in LAYER_RULES.items():
        assert section == "3.7"
        assert f"| `{name}` | {sentence} |" in text


def test_every_feature_that_a_bisection_takes_away_is_documented() -> None:
    text = (DOCS / "bisect.md").read_text()
    table = text[text.index("| taken away |") :]
    assert all(feature.name in table or f"{feature.name}s" in table for feature in TAKEN_AWAY)


def test_the_example_is_a_valid_case() -> None:
    text = (DOCS / "case.md").read_text()
    example = text.partition("```json\n")[2].partition("```")[0]
    assert decode_case(example.encode(), "docs/case.md").exercises == ("chunked_prefill",)


def test_the_drawn_tree_is_what_a_report_draws() -> None:
    text = (DOCS / "trees.md").read_text()
    drawing = "\n".join(draw(WORKED, found("tree.tokens", "the final selection"))[2:])
    assert f"```\n{drawing}\n```" in text
    assert f"than {MOST_LINES} candidates" in text


def test_what_verification_is_given_is_what_follows_from_the_parents() -> None:
    text = (DOCS / "trees.md").read_text()
    parents = tree.tree_parents(SELECTED, 2, EXPANDED)
    first, sibling = tree.retrieve_links(parents)
    for node, depth in enumerate(tree.depths(parents)):
        seen = " ".join(str(other) for other in tree.ancestor_mask(parents)[node].nonzero().flatten().tolist())
        position = f"M + {depth}" if depth else "M"
        cells = (node, parents[node], position, seen, first[node], sibling[node])
        assert f"|{'|'.join(' ' if cell == -1 else f' {cell} ' for cell in cells)}|" in text


def test_the_sizes_of_trees_are_right() -> None:
    rows = [line.split("|")[1:-1] for line in (DOCS / "trees.md").read_text().split("\n") if line.count("|") == 10]
    sizes = [[int(cell) for cell in row[:8]] for row in rows if row[0].strip().isdigit()]
    assert len(sizes) == 7
    for topk, num_steps, nodes, candidates, proposing, *slots in sizes:
        assert candidates == count_candidates(topk, num_steps)
        assert nodes <= candidates + 1
        assert proposing == 1 + (num_steps - 1) * topk
        assert slots == [reserved(topk, num_steps, page, nodes) for page in (1, 4, 16)]


def test_the_drawn_layout_is_where_the_rows_lie() -> None:
    text = (DOCS / "trees.md").read_text()
    for page, width, last in ((1, 11, 18), (4, 8, 31)):
        cells = dict.fromkeys(range(8, last + 1), ".") | dict.fromkeys((8, 9), "c")
        for step, columns in enumerate(layout.draft_columns(10, 3, 3, page).tolist(), 1):
            cells |= {column: f"{branch}.{step}" if step < 3 else "-" for branch, column in enumerate(columns)}
        cells |= dict.fromkeys(layout.hole_columns(10, 3, 3, page).flatten().tolist(), "h")
        for begin in range(8, last + 1, width):
            row = "".join(f"{cells[column]:>5}" for column in range(begin, begin + width))
            assert f"  columns {begin:2} .. {begin + width - 1}{row}\n" in text
