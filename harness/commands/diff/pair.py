"""One case on two SGLangs, such as a pull request and its base: run and judged on each, for `eagletwin diff`.

Each engine watches the functions in which its SGLang differs from the other, by content: a branch whose changes are committed
is looked at like one that is dirty.
"""

from dataclasses import dataclass
from pathlib import Path

from eagletwin.harness.check.confirm import brief
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import Watch
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.difference import keep
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.engines.source import Source, TooMany, between
from eagletwin.harness.engines.start import Zygote
from eagletwin.harness.judge.judge import judge

from ..options import tell


class OneWouldNotStart(Exception):
    """One of the two SGLangs cannot be imported, or refuses the configuration. side: 0 the first, 1 the second."""

    def __init__(self, side: int, error: WouldNotStart) -> None:
        super().__init__(str(error))
        self.side = side


@dataclass(frozen=True, slots=True)
class Half:
    """The case on one of the two."""

    trace: Trace
    verdict: Verdict
    folder: Path

    @property
    def line(self) -> str:
        """How the run ended, on one line."""
        word = "" if self.verdict.status == "equal" else f" {brief(self.verdict)}"
        return f"SGLang {self.trace.header.engine.version}: {self.verdict.status}{word} ({self.folder})"


def run_pair(
    case: Case,
    sources: tuple[Source, Source],
    folder: Path,
    run: RunSpec = DEFAULT_RUN,
) -> tuple[Half, Half]:
    """Run the case on each, in fresh forks, below `folder`. Raises OneWouldNotStart."""
    watched = watches(sources) or (None, None)
    zygotes = [Zygote(source, run.mode, watch=watch) for source, watch in zip(sources, watched, strict=True)]
    try:
        for zygote in zygotes:  # they import at once
            zygote.start()
        halves = []
        for side, zygote in enumerate(zygotes):
            try:
                halves.append(_half(case, zygote, folder / ("left", "right")[side], run))
            except WouldNotStart as error:
                raise OneWouldNotStart(side, error) from error
    finally:
        for zygote in zygotes:
            zygote.close()
    return halves[0], halves[1]


def watches(sources: tuple[Source, Source]) -> tuple[Watch | None, Watch | None] | None:
    """What each engine looks for: in what it differs from the other; two None: in what it differs from what it was made from,
    since both are releases, or differ in too much. None alone: no file differs."""
    if all(source.difference is None and not source.tree for source in sources):
        return None, None  # two releases
    try:
        return between(*sources)
    except TooMany as error:
        tell(f"{error}, more than are listed: which of their functions run is looked at in each tree by itself")
        return None, None


def _half(case: Case, zygote: Zygote, folder: Path, run: RunSpec) -> Half:
    folder.mkdir()
    keep(zygote.source.difference, folder)
    with Host(zygote) as host:
        trace = host.engine(case, (), run.kernels).run(case, folder, run.limits)
    return Half(trace, judge(trace), folder)
