"""Rules by name: how options name them, and their catalogue as Markdown and JSON."""

from collections.abc import Mapping

import msgspec

from .errors import InputError
from .terminal import nearest
from .verdict import LAYER_RULES, PLAIN_RULES, RULES, Rule

# Names of rules in options: the rules to switch off, and the rule that a command looks for.


def rules_off(names: list[str] | None) -> frozenset[str]:
    """Rules to switch off. What happens to the engine or a kernel itself is not a comparison, and cannot be."""
    known = [rule for rule in RULES if not rule.startswith(("engine.", "kernel."))]
    for name in names or ():
        if name not in known:
            raise InputError(
                f"{name!r} is not a rule that can be switched off",
                consequence="nothing was run",
                remedy=nearest(name, known, "docs/reference/rules.md"),
            )
    return frozenset(names or ())


def rule_of(name: str) -> str:
    """A rule by its name. Raises InputError."""
    if name not in RULES:
        raise InputError(
            f"{name!r} is not a rule",
            consequence="nothing was run",
            remedy=nearest(name, RULES, "docs/reference/rules.md"),
        )
    return name


# The catalogue of rules (verdict.RULES) as Markdown, for docs/reference/rules.md, and as JSON, for programs.


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
