"""The tables of docs/reference/rules.md, made of the registry: `python -m tests.harness.rules_page` writes them."""

import re
from pathlib import Path

from eagletwin.harness.judge.rules import tables

PAGE = Path(__file__).parents[2] / "docs/reference/rules.md"


def page() -> str:
    """The page, with the tables of today."""
    rendered = iter(tables())
    return re.sub(r"^\| rule \|.*?(?=\n\n)", lambda _: next(rendered), PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} written")
