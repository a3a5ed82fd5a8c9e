"""Documents that repeat what the code says must say it right."""

from pathlib import Path

import msgspec

from eagletwin.harness.case import Case, EngineSettings, Event, Request, SGLangSettings, decode_case
from eagletwin.harness.exercised import FEATURES
from eagletwin.harness.judge import RULES
from eagletwin.harness.models.recipes import RECIPES

DOCS = Path(__file__).parents[2] / "docs"


def test_every_field_feature_and_recipe_is_documented() -> None:
    text = (DOCS / "case.md").read_text()
    for struct, prefix in ((Case, ""), (Request, "requests[]."), (Event, "events[]."), (SGLangSettings, "engine.sglang.")):
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


def test_the_example_is_a_valid_case() -> None:
    text = (DOCS / "case.md").read_text()
    example = text.partition("```json\n")[2].partition("```")[0]
    assert decode_case(example.encode(), "docs/case.md").exercises == ("chunked_prefill",)
