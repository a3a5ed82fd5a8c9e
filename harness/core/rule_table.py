"""The catalogue of rules (verdict.RULES) as Markdown, for docs/reference/rules.md, and as JSON, for programs."""

from collections.abc import Mapping

import msgspec

from .verdict import LAYER_RULES, PLAIN_RULES, RULES, Rule


def rules_markdown() -> str:
    """The table of all rules."""
    return _table(RULES)


def layer_rules_markdown() -> str:
    """The table of the sentences that hold instead of a multi-layer draft."""
    return _table(LAYER_RULES)


def plain_rules_markdown() -> str:
    """The table of the sentences that hold instead of a draft that is a plain language model."""
    return _table(PLAIN_RULES)


def rules_json() -> bytes:
    """A list of objects: name, sentence, section of docs/explanation/design.md, weights, and of_layers or of_plain where
    another sentence holds of a multi-layer draft or a plain language model."""
    return msgspec.json.format(msgspec.json.encode([_entry(name, rule) for name, rule in RULES.items()]))


def _entry(name: str, rule: Rule) -> dict[str, object]:
    entry: dict[str, object] = {"name": name, **rule._asdict()}
    for key, others in (("of_layers", LAYER_RULES), ("of_plain", PLAIN_RULES)):
        if name in others:
            entry[key] = {"section": others[name].section, "sentence": others[name].sentence}
    return entry


def _table(rules: Mapping[str, Rule]) -> str:
    lines = ["| rule | section | weights | must hold |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {rule.section} | {rule.weights} | {rule.sentence} |" for name, rule in rules.items()]
    return "\n".join(lines)
