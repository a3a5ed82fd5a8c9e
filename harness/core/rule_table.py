"""The catalogue of rules (verdict.RULES) as Markdown, for docs/reference/rules.md, and as JSON, for programs."""

from collections.abc import Mapping

import msgspec

from .verdict import LAYER_RULES, RULES, Rule


def rules_markdown() -> str:
    """The table of all rules."""
    return _table(RULES)


def layer_rules_markdown() -> str:
    """The table of the sentences that hold instead of a multi-layer draft."""
    return _table(LAYER_RULES)


def rules_json() -> bytes:
    """A list of objects: name, sentence, section of docs/explanation/design.md, weights, and of_layers where another sentence
    holds of a multi-layer draft."""
    return msgspec.json.format(msgspec.json.encode([_entry(name, rule) for name, rule in RULES.items()]))


def _entry(name: str, rule: Rule) -> dict[str, object]:
    entry: dict[str, object] = {"name": name, **rule._asdict()}
    of_layers = LAYER_RULES.get(name)
    if of_layers is not None:
        entry["of_layers"] = {"section": of_layers.section, "sentence": of_layers.sentence}
    return entry


def _table(rules: Mapping[str, Rule]) -> str:
    lines = ["| rule | section | weights | must hold |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {rule.section} | {rule.weights} | {rule.sentence} |" for name, rule in rules.items()]
    return "\n".join(lines)
