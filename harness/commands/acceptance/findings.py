"""What `eagletwin acceptance --server` prints: whether rounds are lost, where, under which condition, and by which bug."""

from collections.abc import Sequence

from eagletwin.cases.entry import Condition
from eagletwin.cases.losses import Losing, Suspect, losing_so
from eagletwin.harness.core.errors import status_of
from eagletwin.harness.core.terminal import count, show
from eagletwin.harness.deserved.conditions import AnswerCount, Diagnosis, Seen
from eagletwin.harness.deserved.draft import DraftModel
from eagletwin.harness.deserved.misconfiguration import Mistake
from eagletwin.harness.deserved.server import WAYS, Started

from ..tables import print_table


def print_findings(
    seen: Sequence[Seen],
    diagnosis: Diagnosis,
    started: Started,
    status: int,
    *,
    draft: DraftModel,
    found: Sequence[Suspect] = (),
    betrayed: Sequence[Mistake] = (),
    remarks: Sequence[str] = (),
) -> None:
    """The report.

    found: bugs that lose so; betrayed: mistakes of configuration that explain all answers; remarks: what a reader must know
    beside the rounds.
    """
    unequal = [one for one in seen if not one.compared.equal]
    open_ = sum(one.compared.open for one in seen)
    used = sum(one.compared.used for one in seen)
    fewest, most = (sum(getattr(one.compared.deserved, name) for one in seen) for name in ("fewest", "most"))
    lines = [f"{status_of(status).upper()}  {count(len(seen), 'answer')}: {_deserved(fewest, most)}, {used} used"]
    lines += ["", f"  SGLang {started.version}, {started.algorithm}, num_steps {started.num_steps}, topk {started.topk}"]
    if open_:
        lines.append(
            f"  Near ties in {started.dtype} leave {count(open_, 'round')} open: two logits that differ by less than "
            f"{max(one.compared.tie for one in seen):.2g} of the largest are too close to tell."
        )
    lines += [f"  {remark}" for remark in remarks]
    if draft.algorithm == "EAGLE3" and started.algorithm.upper() != "EAGLE3":
        lines.append(
            f"  The draft is an EAGLE-3 head, and the server was started with {started.algorithm}: start it with EAGLE3."
        )
    if unequal:
        lines += _losses(unequal, len(seen), diagnosis)
    lines += [
        f"  The server drafts as if {mistake.says}: that explains every answer that was looked at." for mistake in betrayed
    ]
    show("\n".join(lines))
    if unequal:
        _table(diagnosis)
        _bugs(diagnosis, found)


def _deserved(fewest: int, most: int) -> str:
    return f"{fewest if fewest == most else f'{fewest} to {most}'} rounds deserved"


def _losses(unequal: Sequence[Seen], count_all: int, diagnosis: Diagnosis) -> list[str]:
    first = min(unequal, key=lambda one: (len(one.sent.answer.prompt), one.sent.number))
    where = {
        "always": "under every condition",
        "mixed": "too few of them, or too mixed, to name a condition",
    }.get(diagnosis.condition, f"with {diagnosis.condition} alone")
    lines = [f"  {len(unequal)} of {count(count_all, 'answer')} did not take the rounds that they deserve, {where}."]
    wrong = first.compared.wrong
    shown = f"  Prompt {first.sent.number}, {WAYS[first.sent.way]}: "
    if wrong:
        numbers = " or ".join(map(str, wrong[0].deserved))
        shown += (
            f"behind {wrong[0].committed + 1} tokens a round accepted {count(wrong[0].used, 'draft')} and deserves {numbers}; "
            f"{count(len(wrong), 'round')} of {first.compared.used} like that."
        )
    else:
        deserved = first.compared.deserved
        shown += f"{_deserved(deserved.fewest, deserved.most)}, {first.compared.used} used."
    return [*lines, shown, ""]


def _table(diagnosis: Diagnosis) -> None:
    def cell(share: AnswerCount) -> str:
        return f"{share.unequal} of {share.count}" if share.count else "no answer"

    print_table(
        ("condition", "lost with it", "lost without it"),
        [(name, cell(having), cell(lacking)) for name, (having, lacking) in diagnosis.shares.items()],
    )


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


def _bugs(diagnosis: Diagnosis, found: Sequence[Suspect]) -> None:
    all_have = _had_by_all(diagnosis) if diagnosis.condition == "always" else []
    if all_have:
        print(f"  Each answer has this: {', '.join(all_have)}. So whether rounds are lost without it is not known.")
    if not found:
        print("  No bug of the ledger that this server can have loses in this way.")
        return
    if diagnosis.condition == "mixed":
        print("  Bugs of the ledger that fit these losses; more prompts may tell which:")
    else:
        print("  Bugs of the ledger that lose in this way:")
    for one in found:
        print(f"    {one.entry.id:24} {one.where}: {one.entry.title}")
