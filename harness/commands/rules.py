"""`eagletwin info rules`: what is checked, rule by rule."""

from typing import Annotated

import typer

from eagletwin.harness.core.errors import EXIT_EQUAL
from eagletwin.harness.core.terminal import fold, width


def rules(as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False) -> int:
    """List the rules: what must hold, and whether a rule needs the model's weights."""
    from eagletwin.harness.core.rules import rules_json
    from eagletwin.harness.core.verdict import LAYER_RULES, PLAIN_RULES, RULES

    if as_json:
        print(rules_json().decode())
        return EXIT_EQUAL
    for name, rule in RULES.items():
        print(f"{name}  (design {rule.section}; weights: {rule.weights})")
        print("\n".join(fold(rule.sentence, width())))
        for of, others in (("a multi-layer draft", LAYER_RULES), ("a plain language model", PLAIN_RULES)):
            if name in others:
                print("\n".join(fold(f"Of {of}: {others[name].sentence}", width())))
    return EXIT_EQUAL
