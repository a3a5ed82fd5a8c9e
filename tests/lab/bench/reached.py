"""Which branches of SGLang's speculative workers the cases of a default search run, how soon, and which they never do.

What is drawn in one block of many comes with all its branches at once, so that a flat end says nothing of what is rarer.
"""

import ast
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from eagletwin.harness.engines.blocks import Block, blocks_of
from eagletwin.harness.engines.source import Source, init_file

from ..mutants.corpus import Known

_FOLDER = "sglang/srt/speculative"
FILES = (
    "eagle_worker_v2.py",
    "multi_layer_eagle_worker_v2.py",
    "eagle_worker_common.py",
    "eagle_utils.py",
    "eagle_info.py",
    "spec_utils.py",
)


@dataclass(slots=True)
class ReachedCode:
    """branches: by file, all of them; ran: (file, line of a branch) -> how many cases ran it; grew: after so many cases, so
    many branches had been run, wherever that was more than before; cases: how many there were"""

    branches: dict[str, list[Block]]
    ran: Counter[tuple[str, int]] = field(default_factory=Counter)
    grew: list[tuple[int, int]] = field(default_factory=list)
    cases: int = 0

    def count(self, cases: Iterable[Known]) -> "ReachedCode":
        """Count what these cases ran."""
        own = {(file, one.line) for file, blocks in self.branches.items() for one in blocks}
        for known in cases:
            self.cases += 1
            before = len(self.ran)
            self.ran.update(own & {(Path(file).name, line) for file, lines in known.ran.items() for line in lines})
            if len(self.ran) > before:
                self.grew.append((self.cases, len(self.ran)))
        return self

    def never(self) -> list[str]:
        """A line for each branch that no case ran."""
        return [
            f"{file}:{one.line}\t{one.function}\t{one.branch}"
            for file, blocks in self.branches.items()
            for one in blocks
            if (file, one.line) not in self.ran
        ]


def branches_of(source: Source) -> dict[str, list[Block]]:
    """By file, the branches of an SGLang's speculative workers. A release that lacks a file has none of it."""
    init = init_file(source)
    assert init is not None
    found = {}
    for name in FILES:
        path = init.parent.parent / _FOLDER / name
        if path.exists():
            found[name] = [block for block, _, _ in blocks_of(ast.parse(path.read_text(encoding="utf-8")))]
    return found


def lines_of(reached: ReachedCode) -> list[str]:
    """What is printed."""
    lines = [f"{'file':34}{'branches':>9}{'ran':>6}"]
    for file, blocks in reached.branches.items():
        lines.append(f"{file:34}{len(blocks):9}{sum((file, one.line) in reached.ran for one in blocks):6}")
    lines += ["", f"{reached.cases} cases ran {len(reached.ran)} of {sum(map(len, reached.branches.values()))} branches"]
    lines += ["after so many cases, so many: " + ", ".join(f"{case}: {count}" for case, count in reached.grew)]
    return lines
