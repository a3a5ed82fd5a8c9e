"""Names of rules in options: the rules to switch off, and the rule that a command looks for."""

from .errors import InputError
from .verdict import RULES
from .words import nearest


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
