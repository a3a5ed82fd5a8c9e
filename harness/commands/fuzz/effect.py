"""The smallest case that shows what a right change does: it is right, and the base is wrong, or records another value."""

import ast
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from msgspec.structs import replace

from eagletwin.cases import entry
from eagletwin.harness.check.confirm import brief
from eagletwin.harness.check.known import KnownBugMatcher, entries_of, remedies_of
from eagletwin.harness.check.repro import literal
from eagletwin.harness.check.trials import Base, Trial, Trials, judge_run
from eagletwin.harness.core.case import Case, pretty_case, without_defaults
from eagletwin.harness.core.differs import Watch
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW, Verdict
from eagletwin.harness.judge.trace_diff import diff

from .looking import CaseSeen
from .shrinking import reduce_case, sizes
from .tally import EffectFacts


@dataclass(slots=True)
class Effect:
    """Makes a case smaller that is right with the change, and wrong on the base; where the base is right, too, one of which it
    records another value.

    until  the time (monotonic) from which the smallest case so far counts; runs: smaller cases so far
    """

    seen: CaseSeen
    matcher: KnownBugMatcher
    base: Base
    until: float
    runs: int = 0

    def explain(self, folder: Path) -> EffectFacts | None:
        """The smallest case, written into `folder` with both traces. None: run alone it has no effect."""
        case = replace(self.seen.case, name="effect", exercises=())
        found = self._on_base(case)
        if found is None:
            return None
        fix = found.signature is not None

        def shows(smaller: Case) -> bool:
            there = self._on_base(smaller) if time.monotonic() < self.until else None
            return there is not None and (there.signature is not None or not fix)

        case = reduce_case(case, shows)
        shutil.rmtree(folder, ignore_errors=True)  # of a search that is resumed
        base, tree = (self._trace(trials, case, folder / side) for side, trials in self._sides.items())
        (folder / "case.json").write_text(pretty_case(case), encoding="utf-8")
        first = min(diff(base, tree).differences, key=lambda one: one.bits, default=None)
        if first is None:  # a recorded value differs from one run to the next
            return None
        verdict = judge_run(base, self._sides["base"].run)
        alone = self._wrong_alone(case)
        pasted = _write_pasted(folder, case, alone, self.base.called, self._patch) if alone is not None else ()
        return EffectFacts(
            case=str(folder / "case.json"),
            sizes=sizes(case),
            place=first.where,
            base=first.left,
            tree=first.right,
            on_base=brief(verdict),
            runs=self.runs,
            partial=time.monotonic() >= self.until,
            paste=pasted,
        )

    @property
    def _patch(self) -> Patch | None:
        """The change, where edits of functions say all of it."""
        source, patches = self.matcher.host.source, self.matcher.run.patches
        if source.difference is None or patches:
            return patches[0] if source.difference is None and len(patches) == 1 else None
        return _patch_between(self.base.host.source.root, source.root, source.difference.watch)

    def _wrong_alone(self, case: Case) -> Verdict | None:
        """What is wrong on the base, and right with the change, where no known bug is mended, as where the case is pasted."""
        base = self.base.look(case, (), DECLARED_VIEW)
        try:
            right = self.matcher.trials((), DECLARED_VIEW).look_alone(case).clean
        except EagletwinError:  # a known bug keeps the engine from starting
            return None
        return base.verdict if right and base is not None and base.signature is not None else None

    @property
    def _sides(self) -> dict[str, Trials]:
        """Who runs cases on the base, and with the change."""
        view, entries = self.seen.view, entries_of(self.seen.mended)
        return {"base": self.base.trials(remedies_of(entries), view), "tree": self.matcher.trials(entries, view)}

    def _on_base(self, case: Case) -> Trial | None:
        """The case on the base, if the change is right there and the base records something else."""
        self.runs += 1
        base, tree = self._sides.values()
        try:
            changed = tree.look_alone(case)
            there = base.look_alone(case) if changed.clean and changed.numbers else None
        except EagletwinError:  # one of them has no such configuration
            return None
        return there if there is not None and there.numbers != changed.numbers else None

    def _trace(self, trials: Trials, case: Case, folder: Path) -> Trace:
        folder.mkdir(parents=True)
        return trials.stand(case).run(case, folder, trials.run.limits, fresh=True)


# What a fix leaves to paste: an entry of the ledger, and a test in the form of the engine's own.
#
# Both hold the smallest case that is wrong without the fix and right with it.

ENTRY, TEST = "entry.py", "test_effect.py"

_ENTRY = '''\
"""Live: TITLE.

CAUSE
"""

from ..entry import {names}

ENTRY = Entry(
    id="ID",
    title="TITLE",
    rule={rule!r},
    buggy="{release} -",
    trigger="TRIGGER",
    remedy={patch!r},
    case={case!r},
)
'''
_TEST = '''\
"""TITLE

The scheduler and the speculative worker of this tree run one small case. eagletwin
(`pip install eagletwin`) compares every number that they make on the way with a slow
reference. {base} {shows} ({rule}).
"""

import json
import tempfile
import unittest
from pathlib import Path

from eagletwin.harness.engines.source import resolve
from eagletwin.harness.families.valid import decode_case
from eagletwin.harness.testing.twin import CaseFailed, Twin
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

CASE = {case}


class TestEffect(unittest.TestCase):
    def test_effect(self):
        with tempfile.TemporaryDirectory() as scratch:
            twin = Twin(Path(scratch), source=resolve(""))
            self.addCleanup(twin.close)
            try:
                twin.check(decode_case(json.dumps(CASE).encode(), "CASE"))
            except CaseFailed as failed:
                self.fail(f"{{failed}}\\n\\n{{failed.argument}}")


if __name__ == "__main__":
    unittest.main()
'''


def _write_pasted(folder: Path, case: Case, wrong: Verdict, base: str, patch: Patch | None) -> tuple[str, ...]:
    """Write both into the folder; their names. wrong: the base's verdict; patch: the fix; None: edits of functions cannot say
    it, and there is no entry."""
    one = wrong.first
    shows = f"gives {one.index} {one.actual} in place of {one.expected}" if one is not None else "does not end it"
    test = _TEST.format(base=base, case=literal(without_defaults(case)), shows=shows, rule=wrong.rule)
    (folder / TEST).write_text(test, encoding="utf-8")
    if patch is None:
        return (TEST,)
    used = set(re.findall(r"(\w+)\(", f"Entry({patch!r}{case!r}"))
    names = ", ".join(sorted(used.intersection({*entry.__all__, "Entry"})))
    text = _ENTRY.format(names=names, rule=wrong.rule, release=base.rpartition(" ")[2], patch=patch, case=case)
    (folder / ENTRY).write_text(text, encoding="utf-8")
    return (ENTRY, TEST)


def _patch_between(old: Path, new: Path, watch: Watch) -> Patch | None:
    """The patch that makes the tree in one folder the one in the other, which differ by `watch`; None: edits of functions do
    not say all of it."""
    if watch.differs.modules or watch.differs.removed or watch.differs.files:
        return None
    edits = list[Edit]()
    for module, functions in watch.modules.items():
        files = [folder.joinpath(*module.split(".")).with_suffix(".py") for folder in (old, new)]
        for one in functions:
            sides = [_source_of(file, one.name.removeprefix(f"{module}.")) for file in files]
            found = edits_between(one.name, *sides) if all(sides) else []
            if not found:
                return None
            edits += found
    return Patch(name="fix", edits=tuple(edits)) if edits else None


def _source_of(file: Path, name: str) -> list[str]:
    """The lines of a function, decorators included, without the indentation of its def; none if it is not there."""
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8")
    found: ast.AST = ast.parse(text)
    for part in name.split("."):
        found = next((one for one in getattr(found, "body", ()) if getattr(one, "name", "") == part), ast.Pass())
    if not isinstance(found, ast.FunctionDef):
        return []
    first = min([found.lineno, *(one.lineno for one in found.decorator_list)])
    return [line[found.col_offset :].rstrip() for line in text.splitlines()[first - 1 : found.end_lineno]]


def edits_between(target: str, old: Sequence[str], new: Sequence[str]) -> list[Edit]:
    """The edits that make one source of a function the other, in the order in which they apply; none if none do."""
    hunks = [hunk for kind, *hunk in SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if kind != "equal"]
    whole = [[hunks[0][0], hunks[-1][1], hunks[0][2], hunks[-1][3]]] if hunks else []  # where one stands in another's way
    return _edits(target, old, new, hunks) or _edits(target, old, new, whole)


def _edits(target: str, old: Sequence[str], new: Sequence[str], hunks: Iterable[Sequence[int]]) -> list[Edit]:
    edits, text = list[Edit](), "\n".join(old)
    for start, end, first, last in hunks:
        margin = _margin(old[start:end])
        while start and (not old[start:end] or text.count(_cut(old[start:end], margin)) != 1 or _less(new[first:last], margin)):
            start, first = start - 1, first - 1  # a line before it, which stands in both
            margin = _margin(old[start:end])
        replacement = "\n".join(line[margin:] for line in new[first:last])
        edits.append(Edit(target=target, match=_cut(old[start:end], margin), replacement=replacement))
        if text.count(edits[-1].match) != 1:
            return []
        text = text.replace(edits[-1].match, replacement.replace("\n", f"\n{' ' * margin}"))
    made = [line for line in map(str.rstrip, text.split("\n")) if line]
    return edits if made == [line for line in new if line] else []


def _margin(lines: Sequence[str]) -> int:
    return len(lines[0]) - len(lines[0].lstrip()) if lines else 0


def _cut(lines: Sequence[str], margin: int) -> str:
    return "\n".join(line[margin:] if n == 0 else line for n, line in enumerate(lines))


def _less(lines: Sequence[str], margin: int) -> bool:
    return any(line and len(line) - len(line.lstrip()) < margin for line in lines)
