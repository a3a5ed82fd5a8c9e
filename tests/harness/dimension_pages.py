"""`python -m tests.harness.dimension_pages` writes what the dimensions say into documents: fields of requests, what a case may
claim, the topics of a search, what a bisection takes away, and how many recipes there are."""

import re
from pathlib import Path

from eagletwin.harness.commands.bisect.measure import FEATURES as TAKEN_AWAY
from eagletwin.harness.commands.fuzz.coverage import TOPICS
from eagletwin.harness.core.case import Sampling
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.dimensions import DIMENSIONS, FEATURES

DOCS = Path(__file__).parents[2] / "docs"


def _case(text: str) -> str:
    """With the rows of dimensions brought up to date, and those that are missing added."""
    for dimension in (one for one in DIMENSIONS.values() if one.row):
        field = "sampling." * (dimension.name in Sampling.__struct_fields__) + dimension.name
        row = f"| `requests[].{field}` | {dimension.row} |\n"
        old = re.search(rf"^\| `requests\[\]\.{field}` \|.*\n", text, re.MULTILINE)
        begin, end = old.span() if old else [text.index("| `events[].at` |")] * 2
        text = text[:begin] + row + text[end:]
    head, begins, tail = text.partition("| name | what happened |\n|---|---|\n")
    rows = "".join(f"| `{name}` | {sentence} |\n" for name, sentence in FEATURES.items())
    return head + begins + rows + "\n" + tail.partition("\n\n")[2]


def _fuzz(text: str) -> str:
    topics = ", ".join(f"`{topic.key}`" for topic in TOPICS)
    return re.sub(r"^The topics: .*$", f"The topics: {topics}.", text, flags=re.MULTILINE)


def _bisect(text: str) -> str:
    """What no other row names, in the row of what nothing takes the place of."""
    head, begins, table = text.partition("| taken away |")
    table, ends, tail = table.partition("\n\n")
    others = "".join(line for line in table.splitlines() if not line.endswith("| none of them |"))
    names = ", ".join(one.words for one in TAKEN_AWAY if not re.search(rf"\b{one.words}\b", others))
    table = re.sub(r"^\| .* \| none of them \|$", f"| {names} | none of them |", table, flags=re.MULTILINE)
    return head + begins + table + ends + tail


def _recipes(text: str) -> str:
    return re.sub(r"^(\| models \| )\d+", rf"\g<1>{len(RECIPES)}", text, flags=re.MULTILINE)


PAGES = {
    DOCS / "reference/case.md": _case,
    DOCS / "guide/fuzz.md": _fuzz,
    DOCS / "guide/bisect.md": _bisect,
    DOCS.parent / "README.md": _recipes,
    DOCS / "reference/coverage.md": _recipes,
}

if __name__ == "__main__":
    for file, page in PAGES.items():
        file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
