"""What `eagletwin acceptance --server` prints: whether rounds are lost, where, under which condition, and by which bug."""

from collections.abc import Sequence

from eagletwin.cases.losses import Losing, losing_so
from eagletwin.harness.core.errors import status_of
from eagletwin.harness.core.terminal import show
from eagletwin.harness.core.words import count
from eagletwin.harness.deserved.conditions import AnswerCount, Diagnosis, Seen
from eagletwin.harness.deserved.draft import DraftModel
from eagletwin.harness.deserved.misconfigured import Mistake
from eagletwin.harness.deserved.sending import WAYS
from eagletwin.harness.deserved.server import Started

from ..tables import print_table


def print_findings(
    seen: Sequence[Seen],
    diagnosis: Diagnosis,
    started: Started,
    status: int,
    *,
    draft: DraftModel,
    betrayed: Sequence[Mistake] = (),
    remarks: Sequence[str] = (),
) -> None:
    """The report.

    betrayed: mistakes of configuration that explain all answers; remarks: what a reader must know beside the rounds.
    """
    unequal = [one for one in seen if not one.compared.equal]
    open_ = sum(one.compared.open for one in seen)
    used = sum(one.compared.used for one in seen)
    fewest, most = (sum(getattr(one.compared.deserved, name) for one in seen) for name in ("fewest", "most"))
    deserved = str(fewest) if fewest == most else f"{fewest} to {most}"
    lines = [f"{status_of(status).upper()}  {count(len(seen), 'answer')}: {deserved} rounds deserved, {used} used"]
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
        _bugs(diagnosis, started, draft.layers > 0)


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
        shown += f"{deserved.fewest} to {deserved.most} rounds deserved, {first.compared.used} used."
    return [*lines, shown, ""]


def _table(diagnosis: Diagnosis) -> None:
    def cell(share: AnswerCount) -> str:
        return f"{share.unequal} of {share.count}" if share.count else "no answer"

    print_table(
        ("condition", "lost with it", "lost without it"),
        [(name, cell(having), cell(lacking)) for name, (having, lacking) in diagnosis.shares.items()],
    )


def _bugs(diagnosis: Diagnosis, started: Started, layers: bool) -> None:
    if diagnosis.condition == "mixed":
        print("  Bugs of the ledger are named by the condition that losses share: more prompts may tell it.")
        return
    # Where each answer has a condition, what loses under it alone loses everywhere.
    all_have = [name for name, (having, lacking) in diagnosis.shares.items() if having.count and not lacking.count]
    conditions = [diagnosis.condition, *(all_have if diagnosis.condition == "always" else ())]
    found = [
        one
        for condition in conditions
        for one in losing_so(
            Losing(
                condition=condition,
                release=started.version,
                layers=layers,
                tree=started.topk > 1,
                num_steps=started.num_steps,
            )
        )
    ]
    if len(conditions) > 1:
        print(f"  Each answer has this: {', '.join(all_have)}. So whether rounds are lost without it is not known.")
    if not found:
        print("  No bug of the ledger loses in this way.")
        return
    print("  Bugs of the ledger that lose in this way:")
    for entry, there in found:
        print(f"    {entry.id:24} {'in this release' if there else f'in {entry.buggy}'}: {entry.title}")
