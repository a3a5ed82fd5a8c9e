"""`python -m tests.harness.case_page` writes into docs/reference/case.md what the dimensions say: fields of requests, and what
a case may claim."""

import re
from pathlib import Path

from eagletwin.harness.core.case import Sampling
from eagletwin.harness.families.dimensions import DIMENSIONS, FEATURES

PAGE = Path(__file__).parents[2] / "docs/reference/case.md"


def page() -> str:
    """The page, with the rows that it has of them brought up to date, and the others added."""
    text = PAGE.read_text(encoding="utf-8")
    for dimension in (one for one in DIMENSIONS.values() if one.row):
        field = "sampling." * (dimension.name in Sampling.__struct_fields__) + dimension.name
        row = f"| `requests[].{field}` | {dimension.row} |\n"
        old = re.search(rf"^\| `requests\[\]\.{field}` \|.*\n", text, re.MULTILINE)
        begin, end = old.span() if old else [text.index("| `events[].at` |")] * 2
        text = text[:begin] + row + text[end:]
    head, begins, tail = text.partition("| name | what happened |\n|---|---|\n")
    rows = "".join(f"| `{name}` | {sentence} |\n" for name, sentence in FEATURES.items())
    return head + begins + rows + "\n" + tail.partition("\n\n")[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
