"""What `eagletwin acceptance --server` says: whether rounds are lost, where, under which condition, and by which bug."""

from collections.abc import Iterator, Sequence

from eagletwin.cases.entry import Condition
from eagletwin.cases.losses import Losing, Suspect, losing_so
from eagletwin.harness.core.terminal import count
from eagletwin.harness.deserved.conditions import Diagnosis, Seen
from eagletwin.harness.deserved.draft import DraftModel
from eagletwin.harness.deserved.misconfiguration import Mistake
from eagletwin.harness.deserved.server import WAYS, Started


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
