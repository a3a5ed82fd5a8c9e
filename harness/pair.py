"""One case on two SGLangs, such as a pull request and its base: run and judged on each, for `eagletwin diff`."""

from dataclasses import dataclass
from pathlib import Path

from .case import Case
from .check import brief
from .engines.mode import CPU, Mode
from .engines.process import Host, Limits, WouldNotStart
from .engines.source import Source
from .engines.start import Zygote
from .engines.wire import Kernels
from .judge import Verdict, judge
from .trace import Trace


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
        """What became of it, on one line."""
        word = "" if self.verdict.status == "equal" else f" {brief(self.verdict)}"
        return f"SGLang {self.trace.header.engine.version}: {self.verdict.status}{word} ({self.folder})"


def run_pair(
    case: Case,
    sources: tuple[Source, Source],
    folder: Path,
    limits: Limits,
    kernels: Kernels = "fast",
    mode: Mode = CPU,
) -> tuple[Half, Half]:
    """Run the case on each, in fresh forks, below `folder`. Raises OneWouldNotStart."""
    zygotes = [Zygote(source, mode) for source in sources]
    try:
        for zygote in zygotes:  # they import at once
            zygote.start()
        halves = []
        for side, zygote in enumerate(zygotes):
            try:
                halves.append(_half(case, zygote, folder / ("left", "right")[side], limits, kernels))
            except WouldNotStart as error:
                raise OneWouldNotStart(side, error) from error
    finally:
        for zygote in zygotes:
            zygote.close()
    return halves[0], halves[1]


def _half(case: Case, zygote: Zygote, folder: Path, limits: Limits, kernels: Kernels) -> Half:
    folder.mkdir()
    with Host(zygote) as host:
        trace = host.engine(case, (), kernels).run(case, folder, limits)
    return Half(trace, judge(trace), folder)
