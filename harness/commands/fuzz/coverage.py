"""Which features a search left out, and which cases run which code of the engine: a search for what a change breaks begins
where the changed code runs.

coverage.json has it of the newest release, as `python -m tests.lab coverage` measured it: of cases of a default search, which
blocks (engines/blocks.py) each ran. A changed statement is looked up by its block; where the release has no such block, as of
a new function or of a Triton kernel, by the functions that name it.
"""

import ast
import dataclasses
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from itertools import chain, combinations
from math import log
from operator import or_
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from eagletwin.cases.strategies import SMALL_TREE, TOPKS
from eagletwin.cases.strategies import VALUES as FOCUS_VALUES
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.differs import ChangedFunction, Differs, Watch, join_names, needs_cuda
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import CPU, Attention, Mode
from eagletwin.harness.core.terminal import count, nearest
from eagletwin.harness.engines.blocks import Block, blocks_of
from eagletwin.harness.engines.source import Source
from eagletwin.harness.families import FAMILIES, RECIPES, family_of, runs_on
from eagletwin.harness.families.dimensions import DIMENSIONS
from eagletwin.harness.families.dimensions.dimension import Dimension
from eagletwin.harness.families.dimensions.production import DIMENSIONS as PRODUCTION
from eagletwin.harness.families.valid import runs_in

from ..options import nothing_run

# Features by which a search is narrowed, and what it left out of them: each with the option that adds it.

# Features that users run: the dimensions that have a name there.
TOPICS = tuple(dimension for dimension in DIMENSIONS.values() if dimension.key)
_BY_KEY = {topic.key: topic for topic in TOPICS}
# Names of one value of a setting: a field of cases.strategies.Focus, and the value.
VALUES: Mapping[str, tuple[str, Any]] = {
    **{f"topk={topk}": ("topk", topk) for topk in TOPKS},
    **{f"context-length={length}": ("context_length", length) for length in sorted(FOCUS_VALUES["context_length"]) if length},
    **{f"updates={how}": ("update_weights", how) for how in FOCUS_VALUES["update_weights"] if how},
    "model-runner=v1": ("model_runner", "v1"),
}
# Topics and values that a block is drawn with, in place of being drawn until it has them.
_HELD: Mapping[str, tuple[str, Any]] = {
    "dp-attention": ("attn_dp_size", 2),
    "chains": ("topk", TOPKS[0]),
    "small-trees": ("tree_size", SMALL_TREE),
    **VALUES,
}
# Options, and fields of Mode, without which a case may run that does not with them. The first of two that suffice is named.
_OPTIONS = tuple(name for name in reversed(Mode.__struct_fields__) if name not in ("engine", "gpu"))


def topics_of(case: Case) -> tuple[str, ...]:
    """The names of the topics that a case has."""
    return tuple(topic.words for topic in TOPICS if topic.has(case))


def has(case: Case, name: str) -> bool:
    """Whether a case has a feature: a topic by its key, a value of a setting, a recipe or a family by its name."""
    if (topic := _BY_KEY.get(name)) is not None:
        return topic.has(case)
    if name in VALUES:
        field, value = VALUES[name]
        of = case if field == "topk" else case.vllm if field == "model_runner" else case.engine.sglang
        return bool(getattr(of, field) == value)
    return name in (case.model, RECIPES[case.model].family)


def feature_filter(only: Sequence[str], left_out: Sequence[str]) -> Callable[[Case], bool]:
    """Whether a case has one of the features of each of `only`, a list with commas, and none of `left_out`. Raises InputError
    for a name that is no feature's."""
    wanted = [each.split(",") for each in only]
    unwanted = [name for each in left_out for name in each.split(",")]
    names = dict.fromkeys([*_BY_KEY, *VALUES, *FAMILIES, *RECIPES])
    for name in (*(name for each in wanted for name in each), *unwanted):
        if name not in names:
            raise nothing_run(f"there is no feature {name!r}", nearest(name, names))
    return lambda case: (
        all(any(has(case, name) for name in each) for each in wanted) and not any(has(case, name) for name in unwanted)
    )


def held_by(only: Sequence[str], mode: Mode) -> dict[str, Any]:
    """Fields of cases.strategies.Focus that are the same in all cases with these features. Of a topic that asked-for recipes
    alone have, the first that the mode runs is drawn."""
    found = dict([_HELD[name] for name in only if name in _HELD] + [("model", name) for name in only if name in RECIPES])
    for topic in (_BY_KEY[name] for name in only if name in _BY_KEY):
        models = [name for name, one in RECIPES.items() if runs_on(one, mode.engine) and topic.has(_smallest(name))]
        if models and all(family_of(RECIPES[name]).asked_for for name in models):
            found.setdefault("model", next((name for name in models if _runs(name, mode)), models[0]))
    return found


def sampling_of(only: Sequence[str], left_out: Sequence[str]) -> str | None:
    """How the requests of all cases with these features sample, as in SearchConstraints; None: in any way, or not."""
    if "sampling" in left_out:
        return ""
    if "rejection" in only:
        return "rejection"
    return None if "sampling" not in only else "target" if "rejection" in left_out else "any"


def not_looked_at(topics: Collection[str], models: Collection[str], mode: Mode) -> list[str]:
    """What neither the cases nor the mode had, each with the option for it."""
    if mode.engine == "vllm":
        others = [name for name, recipe in RECIPES.items() if runs_on(recipe, "vllm") and name not in models]
        recipes = [f"recipes: {', '.join(others)} (--only {others[0]})"] if others else []
        return [*recipes, f"all else that {mode.title} has (docs/guide/vllm.md)"]
    alone = " without --pp" if mode.pp > 1 else ""  # of what a pipeline does not run
    left_out = [topic for topic in TOPICS if topic.words not in topics and (mode.device == "cpu" or topic not in PRODUCTION)]
    missing = [f"{topic.words} (--only {topic.key}{_of_topic(topic, mode)})" for topic in left_out]
    left = dict[str, list[str]]()
    for name, recipe in RECIPES.items():
        if name not in models and runs_on(recipe, mode.engine):
            left.setdefault(_of_recipe(name, mode), []).append(name)
    missing += [f"recipes: {', '.join(names)} (--only {names[0]}{where})" for where, names in sorted(left.items())]
    missing += ["bfloat16, which users run (--dtype bfloat16)"] if mode.dtype == "float32" else []
    missing += [f"tensor parallelism (--tp 2{alone})"] if mode.tp == 1 else []
    if mode.device == "cpu":
        missing += [] if alone or mode.tp > 1 or mode.overlap else ["pipelines (--pp 2)"]
        return [*missing, f"CUDA kernels (--device cuda{alone})"]
    missing += [] if mode.overlap else ["the overlap scheduler (--overlap)"]
    missing += [] if mode.graphs else ["CUDA graphs (--graphs 1,2,4)"]
    return missing + ([] if mode.prefill_graphs else ["graphs of prefill (--prefill-graphs 16,64,256)"])


def _of_topic(topic: Dimension, mode: Mode) -> str:
    """What is to be left out of a mode in which no case has this topic; empty: some case has it."""
    if models := [name for name, one in RECIPES.items() if runs_on(one, mode.engine) and topic.has(_smallest(name))]:
        return min((_of_recipe(name, mode) for name in models), key=len)
    return _left_out([name for name in topic.modes if getattr(mode, name) != getattr(CPU, name)])


def _of_recipe(model: str, mode: Mode) -> str:
    """The least that is to be left out of a mode so that it runs a case of this recipe; empty: it runs some."""
    given = [name for name in _OPTIONS if getattr(mode, name) != getattr(CPU, name)]
    sets = [names for number in range(len(given) + 1) for names in combinations(given, number)]
    for dtype in ("", "bfloat16"):  # one recipe knows this type alone
        for names in sets:
            there = _without(mode, names)
            if _runs(model, replace(there, dtype=dtype) if dtype else there):
                return _left_out(names) + f" with --dtype {dtype}" * bool(dtype)
    raise AssertionError(f"{model} runs in no mode")


def _smallest(model: str) -> Case:
    return Case(name="smallest", model=model, num_steps=1, requests=(Request(id="a", prompt=(0,), max_new_tokens=1),))


def _runs(model: str, mode: Mode) -> bool:
    return runs_in(_smallest(model), mode)


def _without(mode: Mode, names: Collection[str]) -> Mode:
    """The mode without these options, and without those that come with a GPU if that is one of them."""
    names = {*names, *(("graphs", "prefill_graphs", "attention", "gpu") if "device" in names else ())}
    return replace(mode, **{name: getattr(CPU, name) for name in names})


def _left_out(names: Collection[str]) -> str:
    said = [f"without --{name.replace('_', '-')}" if name != "graphs" else "with --graphs none" for name in names]
    return f" {' and '.join(said)}" if said else ""


FILE = Path(__file__).with_name("coverage.json")
PACKAGES = ("sglang.srt", "sglang.kernels", "sglang.jit_kernel")
_TELLS, _TOPICS = 1.5, 3  # how much more often than all cases those with a topic run a change, and how many are named
_KEY = 8  # hexadecimal digits that name a block
_FAR = 3  # functions between a changed one and one that was measured
_MANY = 12  # functions that name one: a name that more have is no function's own

Setting = tuple[str, str]

# Recipes that a search draws only where they are asked for, as a setting of cases: the name by which they are asked for.
RARE: Mapping[Setting, str] = {
    ("model", name): name for name, one in RECIPES.items() if family_of(one).asked_for and runs_on(one, "sglang")
}


def mode_for(name: str, mode: Mode = CPU) -> Mode:
    """The mode in which something of RARE runs: the same, or with another data type."""
    return mode if name not in RECIPES or _runs(name, mode) else replace(mode, dtype="bfloat16")


class Coverage(Struct, frozen=True):
    """A measurement. A set of cases is a hexadecimal number, with a bit for each.

    sglang    the release; cases: how many there are
    settings  name of a setting -> value -> the cases that have it, of what some case has and another one lacks
    blocks    a set of cases -> keys of the blocks that these cases alone ran
    """

    sglang: str
    cases: int
    settings: dict[str, dict[str, str]]
    blocks: dict[str, str]

    def settings_by_case(self) -> list[list[Setting]]:
        """Of each case, its settings."""
        sets = [((name, value), int(cases, 16)) for name, of in self.settings.items() for value, cases in of.items()]
        return [[setting for setting, cases in sets if cases >> number & 1] for number in range(self.cases)]

    def by_key(self) -> dict[str, int]:
        """Key of a block -> the cases that ran it, as bits."""
        return {
            keys[start : start + _KEY]: int(cases, 16)
            for cases, keys in self.blocks.items()
            for start in range(0, len(keys), _KEY)
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """cases: the settings of each measured case; ran: changed statement, or function -> the cases that ran it, as bits.

    changes  what these statements and functions are of
    """

    cases: Sequence[Sequence[Setting]] = ()
    ran: Mapping[str, int] = field(default_factory=dict)
    changes: Sequence[Differs] = ()

    @property
    def text(self) -> str:
        """What a search says first: what is changed, where it begins, and what needs a GPU; "" without a change."""
        if not self.changes:
            return ""
        functions = [name.rpartition(".")[2] for one in self.changes for name in one.functions]
        elsewhere = [name for one in self.changes for name in (*one.modules, *one.removed, *one.files)]
        places = [place for one in self.changes for place in one.places]
        topics = self.topics
        parts = [
            f"{count(len(functions), 'function')} ({join_names(functions)})" if functions else join_names(elsewhere),
            count(len(places), "statement") if places else "",
            f"the search begins with {', '.join(topics)}" if topics else "no measured case is known to run it",
            *(f"--device cuda{option} alone runs {join_names(each)}" for option, each in self._by_a_gpu().items()),
        ]
        return f"changed: {'; '.join(filter(None, parts))}"

    def _by_a_gpu(self) -> dict[str, list[str]]:
        """The further options with which a GPU runs what a CPU does not -> the changed places."""
        backends = [
            name for name in get_args(Attention) if not any(_runs(one, replace(CPU, attention=name)) for one in RECIPES)
        ]
        found = defaultdict[str, list[str]](list)
        for one in self.changes:
            for place in one.places:
                if named := [name for name in backends if Path(place).name.startswith(f"{name}_")]:
                    found[f" --dtype bfloat16 --attention {named[0]}"].append(place)
                elif needs_cuda(one.gates.get(place, "")):
                    found[""].append(place)
        return found

    @property
    def rare(self) -> tuple[str, ...]:
        """What of RARE each measured case has that ran some changed statement, where no case without any ran it."""
        found = [self._rare_of(cases) for cases in self.ran.values()]
        return tuple(dict.fromkeys(name for names in found if "" not in names for name in names))

    @property
    def often(self) -> bool:
        """Whether every second measured case ran some changed statement, or it is not known of any."""
        ran = reduce(or_, self.ran.values(), 0)
        return not ran or 2 * ran.bit_count() >= len(self.cases)

    @property
    def only_rare(self) -> bool:
        """Whether that is so of all changed statements of which measured cases are known."""
        return all("" not in self._rare_of(cases) for cases in self.ran.values())

    def _rare_of(self, cases: int) -> list[str]:
        """What of RARE these cases have; "" for one without."""
        settings = (each for number, each in enumerate(self.cases) if cases >> number & 1)
        return sorted({name for each in settings for name in [RARE[one] for one in each if one in RARE] or [""]})

    @property
    def topics(self) -> list[str]:
        """The topics that tell cases which run the change most from the rest, three at most."""
        runs = [any(cases >> number & 1 for cases in self.ran.values()) for number in range(len(self.cases))]
        if not any(runs):
            return []
        share = sum(runs) / len(runs)
        of, ran = Counter[str](), Counter[str]()
        for reached, settings in zip(runs, self.cases, strict=True):
            topics = [value for name, value in settings if name == "topic"]
            of.update(topics)
            ran.update(topics * reached)
        gain = {topic: number * log(number / of[topic] / share) for topic, number in ran.items()}
        best = sorted((topic for topic in gain if ran[topic] >= _TELLS * share * of[topic]), key=lambda topic: -gain[topic])
        return best[:_TOPICS] or ["all kinds of cases"]


UNMEASURED = Measured()


def key_of(file: str, function: str, branch: str) -> str:
    """file: from the engine's own folder on."""
    return hashlib.sha256("\0".join((file, function, branch)).encode()).hexdigest()[:_KEY]


def settings_of(case: Case) -> list[Setting]:
    """The engine configuration, setting by setting, and the topics of a case."""
    sizes = [(name, str(getattr(case, name))) for name in ("model", "num_steps", "topk", "page_size")]
    own = [one for one in (case.engine.sglang, case.engine.vllm) if one is not None]
    settings = [setting for one in own for setting in msgspec.structs.asdict(one).items()]
    return [*sizes, *((name, str(value)) for name, value in settings), *(("topic", topic) for topic in topics_of(case))]


def measured_of(root: Path, watch: Watch | None, functions: Iterable[str] = ()) -> Measured:
    """Of each changed statement of a tree, and of each of these functions by its dotted name, the measured cases that ran it.
    root: the folder that holds the tree's sglang/."""
    changed = dict(() if watch is None else watch.modules)
    for name in functions:
        module = _module_of(root, name)
        changed[module] = (*changed.get(module, ()), ChangedFunction(name, 0, places=(name,)))
    if not any(changed.values()):
        return UNMEASURED
    coverage, tree = read_coverage(), _Tree(root)
    ran = {
        place: cases
        for module, each in changed.items()
        for one in each
        for place, line in _lines(one)
        if (cases := tree.cases(_file(root, module), one.name.removeprefix(f"{module}."), line))
    }
    return Measured(coverage.settings_by_case(), ran)


def change_in(source: Source, patches: Iterable[Patch] = ()) -> Measured:
    """What a source and patches of it change, and which measured cases run that."""
    watch = source.difference.watch if source.difference is not None else None
    edited = {patch.name: sorted(patch.targets) for patch in patches if patch.targets}
    measured = measured_of(source.root, watch, chain.from_iterable(edited.values()))
    changes = [] if watch is None else [watch.differs]
    changes += [Differs(base=source.called, patch=name, functions=tuple(names)) for name, names in edited.items()]
    return dataclasses.replace(measured, changes=changes)


def _lines(one: ChangedFunction) -> Iterator[tuple[str, int]]:
    yield from [(place, point.line) for point, place in one.calls] if one.points else [(place, 0) for place in one.places]


def _module_of(root: Path, name: str) -> str:
    """The module of a function by its dotted name."""
    while name and not _file(root, name).is_file():
        name = name.rpartition(".")[0]
    return name


def _file(root: Path, module: str) -> Path:
    file = root.joinpath(*module.split("."))
    return file / "__init__.py" if file.is_dir() else file.with_suffix(".py")


@cache
def read_coverage() -> Coverage:
    return msgspec.json.decode(FILE.read_bytes(), type=Coverage)


class _Tree:
    """The sources of one engine, and which measured cases run a place of them."""

    def __init__(self, root: Path) -> None:
        self._root, self._keys = root, read_coverage().by_key()
        self._blocks = dict[Path, list[tuple[Block, range]]]()
        self._texts = dict[Path, str]()

    def cases(self, file: Path, function: str, line: int, far: int = 0) -> int:
        """The cases that ran the innermost measured block of a function around a line; 0: none is known to. line 0: of all."""
        own = [(block, lines) for block, lines in self._of(file) if block.function == function]
        inside = [block for block, lines in own if line in lines or not block.branch]
        for block in sorted(inside, key=lambda block: -block.line):
            if cases := self._keys.get(key_of(str(file.relative_to(self._root)), function, block.branch), 0):
                return cases
        return self._of_callers(function.rpartition(".")[2], far) if far < _FAR else 0

    def _of(self, file: Path) -> list[tuple[Block, range]]:
        """The blocks of a file, each with its lines; none of one that cannot be read."""
        if file not in self._blocks:
            try:
                found = list(blocks_of(ast.parse(file.read_bytes()), kernels=True))
            except (OSError, SyntaxError, ValueError, RecursionError):
                found = []
            self._blocks[file] = [
                (block, range(block.line, (body[-1].end_lineno or block.line) + 1)) for block, body, _ in found
            ]
        return self._blocks[file]

    def _of_callers(self, name: str, far: int) -> int:
        """The cases that ran a function that names this one."""
        if name.startswith("__"):
            return 0
        callers, found = set[tuple[Path, str]](), 0
        for where, text in self._sources().items():
            if name not in text:
                continue
            lines = [text.count("\n", 0, match.start()) + 1 for match in re.finditer(rf"\b{re.escape(name)}\b", text)]
            for line in lines:
                inside = [block for block, body in self._of(where) if line in body]
                if inside and (block := max(inside, key=lambda block: block.line)).function.rpartition(".")[2] != name:
                    callers.add((where, block.function))
            if len(callers) > _MANY:
                return 0
        for where, function in sorted(callers):
            found |= self.cases(where, function, 0, far + 1)
        return found

    def _sources(self) -> dict[Path, str]:
        if not self._texts:
            folders = (self._root.joinpath(*package.split(".")) for package in PACKAGES)
            for file in sorted(chain.from_iterable(folder.rglob("*.py") for folder in folders)):
                self._texts[file] = file.read_text(encoding="utf-8", errors="replace")
        return self._texts
