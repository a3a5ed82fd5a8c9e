"""A worker of a campaign: it runs blocks and looks into findings, on an engine of its own. It knows nothing of Ray.

It stands in a scratch folder and names what it writes as the driver names it, so that reports say where a finding lies on the
driver's machine; the files travel with the finding.
"""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from eagletwin import __version__
from eagletwin.cases.sample_cases import draw_from_seeds_alone
from eagletwin.harness.check.known import Mends
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.engines.source import resolve

from ..fuzz.inquiry import Inquiry
from ..fuzz.looking import NO_BLOCK, Looking
from ..fuzz.messages import BlockFailed
from ..fuzz.report import finding_text
from ..fuzz.shrinking import Teller
from .corpus import CorpusBlock, blocks_of
from .messages import (
    Answer,
    BlockJob,
    BugBehind,
    InquiryJob,
    Packed,
    Refusal,
    SetAside,
    Terms,
    Up,
    packed,
    read_job,
    read_terms,
)

_DEEP = 12  # folders that a path of the driver's may go up from where it runs


class Worker:
    """Runs the jobs of a campaign, one at a time. What it is told, and what it answers, is JSON (messages.py).

    Its process moves to a scratch folder.
    """

    def __init__(self, terms: bytes, started: Host | None = None) -> None:
        draw_from_seeds_alone()
        self._scratch = tempfile.mkdtemp(prefix="eagletwin-")
        inside = Path(self._scratch, *("d" * _DEEP))
        inside.mkdir(parents=True)
        os.chdir(inside)
        self._terms: Terms = read_terms(terms)
        self._started = started  # a host that stands already
        self._leg, self._host = -1, started
        self._looking: Looking | None = None
        self._mends: Mends | None = None
        self._blocks: list[CorpusBlock] = []

    def up(self) -> bytes:
        """Answers as soon as the process is there."""
        return packed(Up(__version__, platform.node(), os.getpid()))

    def run(self, job: bytes) -> Iterator[bytes]:
        """The answers of a job, as they come."""
        wanted = read_job(job)
        try:
            self._enter(wanted.leg)
            for answer in self._block(wanted) if isinstance(wanted, BlockJob) else self._inquire(wanted):
                yield packed(answer)
        except WouldNotStart as error:
            self._leave()
            yield packed(Refusal(str(error)))
        except EagletwinError as error:
            self._leave()  # the next job begins with engines of its own
            yield packed(BlockFailed(error.cause, error.consequence, error.remedy))

    def close(self) -> None:
        """End the engines, and remove what was written."""
        self._leave()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _leave(self) -> None:
        if self._host is not None and self._host is not self._started:
            self._host.close()
        self._leg, self._host = -1, self._started

    def _enter(self, leg: int) -> None:
        """Have the SGLang of this leg, and no other: one is imported at a time. Raises WouldNotStart."""
        if leg == self._leg:
            return
        self._leave()
        options = self._terms.options_of(leg)
        if self._host is None:
            self._host = Host(source=resolve(options.run.sglang), mode=options.run.mode)
        self._host.connection()
        self._mends = Mends(self._host, options.run)
        self._looking = Looking(self._mends, self._terms.plan_of(leg))
        self._blocks = blocks_of(self._terms.legs[leg].corpus)
        self._leg = leg

    def _block(self, job: BlockJob) -> Iterator[Answer]:
        assert self._looking is not None
        if self._blocks:
            yield from self._looking.run(self._blocks[job.block], job.earlier)
        else:
            yield from self._looking.block(job.block, job.earlier)

    def _inquire(self, job: InquiryJob) -> Iterator[Answer]:
        assert self._mends is not None
        if self._blocks:
            job = _with_no_block(job)
        inquiry = Inquiry(self._mends, self._terms.plan_of(job.leg), job.seen)
        if bug := inquiry.bug():
            yield BugBehind(bug)
            return
        said: list[Answer] = []
        finding = self._shrunk(inquiry, job, said.append)
        yield from said
        yield finding

    def _shrunk(self, inquiry: Inquiry, job: InquiryJob, say: Callable[[Answer], None]) -> Packed:
        """Make it small, in the worker's scratch folder, and take what is there then."""

        def aside(case: Case, signature: Signature, undecided: bool) -> None:
            say(SetAside(case, signature, undecided))

        folder = Path(job.folder)
        teller = Teller(aside=aside, news=lambda text: None, look=lambda text: None)
        try:
            finding = inquiry.finish(inquiry.begin(folder, teller), job.cases, job.seconds)
            files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        text = finding_text(finding, job.columns)
        return Packed(finding.signature, finding.status, finding.name, text, finding.facts, files)


def _with_no_block(job: InquiryJob) -> InquiryJob:
    """Of a case from a file one thing after the other is taken away."""
    return replace(job, seen=replace(job.seen, block=NO_BLOCK))
