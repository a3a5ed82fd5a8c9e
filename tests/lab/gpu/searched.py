"""Jobs of blocks as a search draws them (`gpu plan --blocks`): every recipe and option that a GPU runs, each with its share.

A search on a CPU has four cases in a block, since an engine starts in a second there. Here one starts in twenty, so a block has
as many as are asked for. A job draws its cases itself, where it runs: a plan of 100,000 cases would be hundreds of megabytes.
"""

from msgspec import Struct

from eagletwin.cases.blocks import Block, SearchConstraints, block_of
from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.reach import why_unreachable
from eagletwin.harness.check.known import may_show
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.families.valid import runs_in

_GRAPHS = Mode(device="cuda", graphs=(1,))
_FEWER = 4  # times fewer cases of a block with large ones, so that jobs take about as long


class Draw(Struct, frozen=True):
    """Which cases a job draws: the first `cases` of block `number` of the search with this seed, with or without overlap."""

    seed: int
    number: int
    cases: int
    overlap: bool

    @property
    def block(self) -> Block:
        """The block. Raises InputError if there is none of its number."""
        return block_of(
            self.seed, self.number, SearchConstraints(wanted=runs_on_a_gpu, overlap=self.overlap, retract=not self.overlap)
        )

    def draw(self) -> tuple[Case, ...]:
        """The cases, which share a configuration."""
        block = self.block
        count = self.cases // _FEWER if block.large else self.cases
        return tuple(block.cases(max(count, 1)))


def runs_on_a_gpu(probe: Case) -> bool:
    """Whether such a configuration runs in all modes of a plan: float32, with graphs and without."""
    return runs_in(probe, _GRAPHS)


def bugs_of(probe: Case, release: str, mode: Mode) -> dict[str, Patch]:
    """Live bugs of the release that cases of this configuration may show in this mode, and what mends each."""
    return {
        entry.id: entry.remedy
        for entry in LEDGER.values()
        if entry.remedy is not None
        and entry.is_in(release)
        and not why_unreachable(entry, mode)
        and may_show(entry, probe, mode)
    }
