"""Lost rounds of a server: under which condition, by which bugs of the ledger, and how small a loss would have shown."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from eagletwin.cases.entry import Condition, Doing, Entry
from eagletwin.cases.ledger import entries_in
from eagletwin.harness.core.run_spec import Engine
from eagletwin.harness.core.terminal import count
from eagletwin.harness.deserved.conditions import Diagnosis, Seen
from eagletwin.harness.deserved.draft import DraftModel
from eagletwin.harness.deserved.misconfiguration import Mistake
from eagletwin.harness.deserved.server import WAYS, Started
from eagletwin.harness.deserved.statistics import Power, Stake

State = Literal["in this release", "not known", "fixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Losing:
    """A server: its engine and release, what it drafts, and what else it does."""

    release: str
    layers: bool
    tree: bool
    num_steps: int
    engine: Engine = "sglang"
    does: frozenset[Doing] = frozenset()


@dataclass(frozen=True, slots=True)
class Suspect:
    """A bug that the server may have, and whether its release has it; of a commit or a fork that is not known."""

    entry: Entry
    state: State

    def __str__(self) -> str:
        return f"{self.entry.id} ({self.where})"

    @property
    def needs(self) -> Doing | None:
        """Without this no server has it."""
        return None if self.entry.loses is None else self.entry.loses.needs

    @property
    def where(self) -> str:
        """Which code has it, in words."""
        return {
            "in this release": "in this release",
            "not known": f"in {self.entry.buggy}; this one is not known",
            "fixed": f"fixed in {self.entry.fixed}: only a tree without the fix has it",
        }[self.state]


def losing_so(condition: Condition, server: Losing) -> list[Suspect]:
    """Bugs that lose under a condition and that the server can have: those of its release first, then those that a change of it
    may have brought back. One that came after its release is none of them, nor is a layout that is declared and followed
    (`view`): what it costs is deserved."""
    found = [
        Suspect(entry, state)
        for entry in entries_in(server.engine).values()
        if entry.loses is not None
        and entry.view is None
        and entry.loses.condition == condition
        and entry.loses.layers in (None, server.layers)
        and entry.loses.tree in (None, server.tree)
        and entry.loses.num_steps <= server.num_steps
        and entry.loses.needs in (None, *server.does)
        and (state := _state(entry, server.release)) is not None
    ]
    order: tuple[State, ...] = ("in this release", "not known", "fixed")
    return sorted(found, key=lambda one: order.index(one.state))


def _state(entry: Entry, release: str) -> State | None:
    """None: the release is older than the bug."""
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(release)
    except InvalidVersion:
        return "not known"
    if entry.is_in(release):
        return "in this release"
    return "fixed" if entry.fixed and version >= Version(entry.fixed) else None


def loss_remarks(
    seen: Sequence[Seen],
    diagnosis: Diagnosis,
    started: Started,
    draft: DraftModel,
    found: Sequence[Suspect] = (),
    betrayed: Sequence[Mistake] = (),
) -> Iterator[str]:
    """Sentences on answers of which something can be told. found: bugs that lose so; betrayed: mistakes of configuration that
    explain all answers."""
    unequal = [one for one in seen if not one.compared.equal]
    if open_ := sum(one.compared.open for one in seen):
        yield (
            f"Near ties in {started.dtype} leave {count(open_, 'round')} open: two logits that differ by less than "
            f"{max(one.compared.tie for one in seen):.2g} of the largest are too close to tell."
        )
    if draft.algorithm == "EAGLE3" and started.algorithm.upper() != "EAGLE3":
        yield f"The draft is an EAGLE-3 head, and the server was started with {started.algorithm}: start it with EAGLE3."
    if unequal:
        yield from _losses(unequal, len(seen), diagnosis)
        yield from _bugs(diagnosis, found)
    for mistake in betrayed:
        yield f"The server drafts as if {mistake.says}: that explains every answer that was looked at."


def _losses(unequal: Sequence[Seen], count_all: int, diagnosis: Diagnosis) -> Iterator[str]:
    first = min(unequal, key=lambda one: (len(one.sent.answer.prompt), one.sent.number))
    where = {
        "always": "under every condition",
        "mixed": "too few of them, or too mixed, to name a condition",
    }.get(diagnosis.condition, f"with {diagnosis.condition} alone")
    yield f"{len(unequal)} of {count(count_all, 'answer')} did not take the rounds that they deserve, {where}."
    wrong = first.compared.wrong
    shown = f"Prompt {first.sent.number}, {WAYS[first.sent.way]}: "
    if wrong:
        numbers = " or ".join(map(str, wrong[0].deserved))
        shown += (
            f"behind {wrong[0].committed + 1} tokens a round accepted {count(wrong[0].used, 'draft')} and deserves {numbers}; "
            f"{count(len(wrong), 'round')} of {first.compared.used} like that."
        )
    else:
        deserved = first.compared.deserved
        band = " to ".join(dict.fromkeys(map(str, (deserved.fewest, deserved.most))))
        shown += f"{band} rounds deserved, {first.compared.used} used."
    yield shown


def suspects(diagnosis: Diagnosis, server: Losing) -> list[Suspect]:
    """Bugs of the ledger that lose as the answers do; where they share no condition, those that fit each loss."""
    fitting: list[Condition] = [
        name for name, (having, lacking) in diagnosis.shares.items() if having.unequal and not lacking.unequal
    ]
    conditions: list[Condition] = {
        "": [],
        "mixed": ["always", *fitting],
        # Where each answer has a condition, what loses under it alone loses everywhere.
        "always": ["always", *_had_by_all(diagnosis)],
    }.get(diagnosis.condition, [name for name in diagnosis.shares if name == diagnosis.condition])
    return [one for condition in conditions for one in losing_so(condition, server)]


def _had_by_all(diagnosis: Diagnosis) -> list[Condition]:
    return [name for name, (having, lacking) in diagnosis.shares.items() if having.count and not lacking.count]


def _bugs(diagnosis: Diagnosis, found: Sequence[Suspect]) -> Iterator[str]:
    all_have = _had_by_all(diagnosis) if diagnosis.condition == "always" else []
    if all_have:
        yield f"Each answer has this: {', '.join(all_have)}. So whether rounds are lost without it is not known."
    if not found:
        yield "No bug of the ledger that this server can have loses in this way."
    elif diagnosis.condition == "mixed":
        yield "Bugs of the ledger that fit these losses; more prompts may tell which:"
    else:
        yield "Bugs of the ledger that lose in this way:"
    for one in found:
        yield f"{one.entry.id}, {one.where}: {one.entry.title}."


CAPTION = "Smallest loss, of each draft by chance, that shows in 95 of 100 such runs"
HEADER = ("answers", "prompts", "drafts at stake", "smallest loss")

# 26329 undone, an EAGLE head and chunks of 64: one round of 2,200 drafts (docs/records/detection.md).
_SMALLEST_KNOWN = 2000


def hidden_bugs(power: Power, server: Losing) -> dict[str, list[Suspect]]:
    """Of each condition that no answer is known to have: the bugs of such a server that need it; and of requests that sample,
    where there was none."""
    conditions: tuple[Condition, ...] = ("always", *power.conditions)
    samples = replace(server, does=server.does | {"sampling"})
    found = [one for name in conditions for one in losing_so(name, samples)]
    hidden: dict[str, list[Suspect]] = {
        name: losing_so(name, server) for name, stake in power.conditions.items() if not stake.prompts
    }
    if samples != server and (sampled := [one for one in found if one.needs == "sampling"]):
        hidden["sampling"] = sampled
    return hidden


def power_rows(power: Power) -> list[tuple[str, str, str, str]]:
    """Cells below HEADER."""
    return [_row("all", power.every), *(_row(name, stake) for name, stake in power.conditions.items())]


def _row(name: str, stake: Stake) -> tuple[str, str, str, str]:
    prompts = "not known" if stake.prompts is None else str(stake.prompts)
    return name, prompts, str(stake.drafts), f"1 draft in {stake.one_in}" if stake.one_in else "-"


def power_remarks(power: Power, hidden: Mapping[str, Sequence[str]]) -> list[str]:
    """Sentences below the table. hidden: bugs in words, by condition"""
    remarks = []
    stakes: dict[str, Stake] = {"all": power.every, **{str(name): stake for name, stake in power.conditions.items()}}
    low = [name for name, stake in stakes.items() if stake.prompts and stake.one_in < _SMALLEST_KNOWN]
    if low:
        remarks.append(
            f"Low power: {', '.join(low)}. Bugs of the ledger were seen that lose 1 draft in {_SMALLEST_KNOWN}, and a smaller "
            "share may still be one. More prompts, or a larger --new-tokens, put more drafts at stake."
        )
    if power.merged:
        remarks.append(
            f"The stream of {count(power.merged, 'answer')} does not tell where rounds began: a loss shows there only if it "
            f"takes more than {count(power.slack, 'further round')}."
        )
    if power.conditions["batches"].prompts:
        remarks.append("The server does not say which of the prompts that were sent at once ran in one batch.")
    for name, bugs in hidden.items():
        known = name == "sampling" or stakes[name].prompts is not None
        has = f"No answer has this condition: {name}." if known else f"Whether any answer has this is not known: {name}."
        could_not = f"These bugs could not show: {'; '.join(bugs)}." if bugs else "No bug that this server can have needs it."
        remarks.append(f"{has} {could_not}")
    return remarks
