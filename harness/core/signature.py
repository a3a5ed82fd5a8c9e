"""A finding in words: its identity while its case shrinks, and the place of its number."""

import re
from dataclasses import dataclass

from .records import Ending
from .verdict import Divergence, Verdict

# What a trial found, in the few words that stay the same while a case shrinks: the identity of a finding.
#
# Many bugs break the same rule, so a rule's name does not identify a bug: a search that knew `draft.hidden_in` would set aside
# every other bug of that rule, and its shrinking would slip from one bug to another.

# What differs between two cases that show the same thing: names of requests, numbers, and how many numbers a list has.
_REQUEST = re.compile(r"\brequests? [\w'\"-]+")
_NUMBER = re.compile(r"-?\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b")
_LIST = re.compile(r"#(?:, #)+")


@dataclass(frozen=True, slots=True, order=True)
class Signature:
    """Two trials with equal signatures show the same finding.

    rule    the rule that is broken; "" of an `unknown` that no rule names
    stage, layer  of a divergence: the stage of its record, and the layer of a multi-layer draft
    kernel  of a kernel.* rule: the kernel
    cause   of an `unknown`: the exception's class with the release's innermost frame, by file and function (lines move when a
            patch edits a function); where no exception was seen, the reason without its numbers and names of requests
    """

    rule: str = ""
    stage: str = ""
    layer: int = 0
    kernel: str = ""
    cause: str = ""

    def __str__(self) -> str:
        where = self.kernel or self.cause or self.stage
        layer = f", layer {self.layer}" if self.layer else ""
        return f"{self.rule or 'unknown'} ({where}{layer})" if where else self.rule or "unknown"

    @property
    def slug(self) -> str:
        """For the name of a file."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", str(self)).strip("-.")[:80]


def signature_of(verdict: Verdict, ending: Ending) -> Signature | None:
    """The signature of a verdict and the ending of its run; None: nothing was found, or the run was stopped before that."""
    first, origin = verdict.first, ending.origin or ""
    if first is not None:
        kernel = first.stage == "kernel"
        return Signature(rule=first.rule, stage=first.stage, layer=first.layer, kernel=origin if kernel else "")
    if verdict.status == "equal" or verdict.vacuous or ending.kind == "stopped":
        return None
    ended = ending.kind not in ("finished", "stopped")
    return Signature(rule=verdict.rule, cause=origin or without_numbers(ending.detail if ended else verdict.reason))


def without_numbers(text: str) -> str:
    """A reason without what differs from case to case."""
    return _LIST.sub("#", _NUMBER.sub("#", _REQUEST.sub("a request", text)))


# Where a number stands, in words: the stages of a trace, and the place of a divergence.

STAGES = {
    "target.extend": "target prefill",
    "draft.extend": "draft extend (prefill)",
    "prefill": "after draft extend (prefill)",
    "draft.decode": "draft decode",
    "draft": "when draft() returned",
    "target.verify": "target verify",
    "verify": "when verify returned",
    "draft.extend_decode": "draft extend (decode)",
    "extend": "after draft extend (decode)",
    "finished": "end of the request",
    "cached": "prefix cache at the end",
    "copy": "a copy between device and host",
    "looked_up": "when a request was looked up in the prefix cache",
    "kernel": "inside a kernel",
    "batch": "before a batch ran",
    "iteration": "before a scheduler iteration",
    "steps": "before verify, of the whole batch",
    "read": "when a batch's result was looked at before a retraction",
    "fed": "when a batch's result was processed",
    "idle": "in an idle batch",
    "gathered": "before a forward",
    "session": "when a request of a session was handed in",
    "flushed": "after the cache was flushed",
    "pool": "between two batches",
    "plain": "in plain decode",
}


def place_of(found: Divergence, num_steps: int, layers: bool) -> str:
    """Rank, request, round and stage, with its step and layer."""
    where = f"request {found.request}, round {found.round}, " if found.request else ""
    stage = STAGES[found.stage]
    first = 0 if found.stage == "draft.decode" else 1  # a plain language model's step 0; of draft() the whole has none
    if found.stage in ("draft.decode", "draft") and first <= found.step < num_steps:  # nor has what comes after the last step
        stage = f"draft decode step {found.step}" + (", when draft() returned" if found.stage == "draft" else "")
    if layers and found.rule.startswith("draft.") and found.stage != "draft":
        stage += f", layer {found.layer}"
    return (f"rank {found.rank}, " if found.rank is not None else "") + where + stage
