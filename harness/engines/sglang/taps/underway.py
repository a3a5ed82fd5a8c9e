"""What is under way: the batch that runs, and the phases of it that have begun. Boundary and inner taps share it."""

from dataclasses import dataclass, field
from typing import Any

from .draft_pass import DraftPass
from .extend_pass import ExtendPass
from .forward_pass import ForwardPass
from .verify_pass import VerifyPass


@dataclass(slots=True)
class Underway:
    """A phase is None before it begins in this batch, and stays when it has ended, until the next batch.

    `drafting`, `verifying` and `extending` raise AssertionError where a worker does a thing before the phase that it belongs
    to: the run is then one that eagletwin cannot tell anything of.
    """

    requests: list[Any] = field(default_factory=list)
    draft: DraftPass | None = None
    verify: VerifyPass | None = None
    extend: ExtendPass | None = None
    forward: ForwardPass | None = None

    def batch_begins(self, requests: list[Any]) -> None:
        self.requests = requests
        self.draft = self.verify = self.extend = self.forward = None

    def drafting(self) -> DraftPass:
        assert self.draft is not None, "a step of a draft before draft() was called"
        return self.draft

    def verifying(self) -> VerifyPass:
        assert self.verify is not None, "trees were walked before verify() was called"
        return self.verify

    def extending(self) -> ExtendPass:
        assert self.extend is not None, "draft extend of a round before verify() returned"
        return self.extend
