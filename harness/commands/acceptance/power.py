"""How small a loss the answers would have shown, and which bugs none of them could show: a table and its remarks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eagletwin.cases.entry import Condition
from eagletwin.cases.losses import Losing, Suspect, losing_so
from eagletwin.harness.core.terminal import count
from eagletwin.harness.deserved.statistics import Power, Stake

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
