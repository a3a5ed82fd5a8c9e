"""The cases in which mutants are searched: those of a default search, each with the blocks of SGLang that it runs.

They are what `eagletwin fuzz --seed 0` draws, in its order. A case is taken if it is equal on this SGLang, with the remedies of
known bugs that the search itself applies; what is not equal then with a mutant is the mutant's. A mutant in a block that a case
does not run leaves the case as it is, so such a case need not be run with it.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from eagletwin.cases.blocks import SearchConstraints
from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.sample_cases import draw_from_seeds_alone
from eagletwin.cases.strategies import REQUEST_OPTIONS
from eagletwin.harness.check.known import KnownBugMatcher, with_workarounds
from eagletwin.harness.commands.fuzz.looking import BlockRunner, CaseSeen
from eagletwin.harness.commands.fuzz.options import Plan
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.run_spec import DEFAULT_RUN, Engine, Mode, RunSpec
from eagletwin.harness.core.verdict import View
from eagletwin.harness.engines.blocks import FOLDER, OF, SPECULATIVE
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import Source

# Whose places are mutated: the speculative workers, and where the scheduler handles what they return.
MODULES = (
    SPECULATIVE,
    "sglang.srt.managers.overlap_utils",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.managers.scheduler_components.batch_result_processor",
)

FIELDS = [name for name, ask in REQUEST_OPTIONS.items() if ask.draw is not None]


class Known(Struct, frozen=True):
    """An equal case.

    told    the option of the search; "" of one without. block: of the search
    mended  entries of the ledger whose remedies it runs with, and the view in which it is judged
    ran     file -> first lines of the blocks that it runs
    """

    block: int
    case: Case
    mended: tuple[str, ...]
    view: View
    ran: dict[str, tuple[int, ...]]
    told: str = ""

    def runs(self, file: str, block: int) -> bool:
        return block in self.ran.get(file, ())

    @property
    def traits(self) -> frozenset[str]:
        """What kind of case it is: a mutant may show in one kind alone."""
        case, settings = self.case, self.case.engine.sglang
        asked = [name for request in case.requests for name in FIELDS if getattr(request, name, None)]
        kinds = [f"{event.kind}" for event in case.events]
        flags = {
            "tree": case.topk > 1,
            "pages": case.page_size > 1,
            "cache": settings.radix_cache,
            "samples": any(request.sampling is not None for request in case.requests),
            "rejection": settings.rejection_sampling,
            "several": len(case.requests) > 1,
            "chunks": bool(case.chunks),
            "one step": case.num_steps == 1,
            "mixed": settings.mixed_chunks,
            "deterministic": settings.deterministic,
        }
        return frozenset([case.model, *asked, *kinds, *(name for name, has in flags.items() if has), self.told])

    @property
    def run(self) -> RunSpec:
        return with_workarounds(DEFAULT_RUN, [LEDGER[name] for name in self.mended], self.view)


def gather(source: Source, seed: int, blocks: int, asking: int, each: int, modules: Sequence[str] = MODULES) -> Iterator[Known]:
    """Up to `each` equal cases of each of the first `blocks` blocks of a default search, and of the first `asking` blocks of a
    search for each thing that requests may ask for. modules: whose blocks are noted; of none, all that a process
    ran of the speculative workers since it began."""
    engine = source.engine
    searches = {told: (_asking(told, engine), range(asking if told else blocks)) for told in ("", *FIELDS)}
    return gather_blocks(source, Mode(engine=engine), seed, searches, each, modules)


def _asking(told: str, engine: Engine) -> SearchConstraints:
    return SearchConstraints(asks=(told,) if told else (), production=engine == "sglang", engine=engine)


def gather_blocks(
    source: Source,
    mode: Mode,
    seed: int,
    searches: Mapping[str, tuple[SearchConstraints, Iterable[int]]],
    each: int,
    modules: Sequence[str],
) -> Iterator[Known]:
    """The same of searches in this mode: of each what it is told, its constraints, and which of its blocks are run."""
    draw_from_seeds_alone()
    with tempfile.TemporaryDirectory(prefix="eagletwin-") as folder, _Noting(folder, modules), Host(None, source, mode) as host:
        matcher = KnownBugMatcher(host, replace(DEFAULT_RUN, mode=mode))
        for told, (asked, numbers) in searches.items():
            plan = Plan(seed=seed, seconds=0.0, max_cases=0, shrink_seconds=0.0, command="", asked=asked)
            looking = BlockRunner(matcher, plan)
            for number in numbers:
                for known in islice(_equal(looking, number, Path(folder), source.engine), each):
                    yield replace(known, told=f"requests with {told}" if told else "")


def _equal(looking: BlockRunner, number: int, folder: Path, package: str) -> Iterator[Known]:
    """The equal cases of a block."""
    for seen in looking.block(number):
        told = [msgspec.json.decode(file.read_bytes(), type=dict[str, list[int]]) for file in folder.glob("*.json")]
        for file in folder.glob("*.json"):
            file.unlink()
        if isinstance(seen, CaseSeen) and seen.block == number and seen.verdict.status == "equal" and not seen.known:
            ran = {_short(path, package): tuple(lines) for one in told for path, lines in one.items() if lines}
            yield Known(seen.block, seen.case, seen.mended, seen.view, ran)


def _short(path: str, package: str) -> str:
    """The file, from the engine's own folder on."""
    return path[path.rindex(f"/{package}/") + 1 :]


class _Noting:
    """While it lasts, processes that are started note what they run."""

    def __init__(self, folder: str, modules: Sequence[str]) -> None:
        self._set = {FOLDER: folder} | ({OF: ",".join(modules)} if modules else {})

    def __enter__(self) -> None:
        os.environ.update(self._set)

    def __exit__(self, *_: object) -> None:
        for name in self._set:
            os.environ.pop(name, None)
