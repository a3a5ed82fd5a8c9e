"""The result of `eagletwin acceptance`: acceptance.json, and the document that is made of it alone."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eagletwin.cases.entry import Condition
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, status_of
from eagletwin.harness.core.run_spec import TITLES
from eagletwin.harness.core.terminal import count, show, width
from eagletwin.harness.deserved.conditions import AnswerCount
from eagletwin.harness.deserved.follow import Shape
from eagletwin.harness.deserved.rounds import Wrong
from eagletwin.harness.deserved.server import WAYS, Started, Way
from eagletwin.harness.deserved.statistics import MOST_DEVIATIONS, Figures, Interval, Power, Span
from eagletwin.harness.page.document import Document, DocumentSection, Table, TableCell, row, table
from eagletwin.harness.page.render import text_of, write_page

from ..page_facts import read_facts
from .losses import CAPTION, HEADER, power_remarks, power_rows

FACTS = "acceptance.json"
_MOST = 2000  # answers that are listed


class Deserved(Figures, frozen=True, kw_only=True):
    """The acceptance that a pair deserves on some texts.

    off_target        tokens of the texts that the target itself would not have said
    better_read_as    readings of the checkpoint with which the head accepts clearly more
    rounds_in_sglang  by the layout of SGLang's drafted rows
    """

    pair: tuple[str, str]
    shape: Shape
    off_target: int
    better_read_as: list[str]
    rounds_in_sglang: int
    exit_code: int = EXIT_EQUAL


class AnswerRounds(Struct, frozen=True, kw_only=True):
    """An answer of a server. deserved: fewest and most rounds; untold: it cannot be told what they deserve."""

    prompt: int
    way: str
    tokens: int
    cached: int
    deserved: tuple[int, int]
    used: int
    wrong: tuple[Wrong, ...] = ()
    untold: bool = False
    untold_cause: str = ""


class ServerAcceptance(Struct, frozen=True, kw_only=True):
    """The acceptance that a server gives a pair.

    condition  what all losses have in common; shares: answers with and without each condition
    as_if      mistakes of configuration that explain all answers; bugs: those of the ledger that lose so
    remarks    sentences on the losses; strange: the server says too much that the target does not
    """

    server: Started
    exit_code: int
    condition: str
    off_target: int
    answers: list[AnswerRounds]
    as_if: list[str]
    bugs: list[str]
    power: Power
    hidden_bugs: dict[str, list[str]]
    shares: dict[Condition, tuple[AnswerCount, AnswerCount]]
    remarks: list[str]
    strange: bool = False


class WayRounds(Struct, frozen=True, kw_only=True):
    """Rounds of the answers to prompts that were sent in one way."""

    way: Way
    expected: float
    used: int
    deviations: float


class ExpectedRounds(Struct, frozen=True, kw_only=True):
    """Rounds of a server that accepts by chance. deviations: standard ones, by which its rounds are off."""

    server: Started
    exit_code: int
    temperature: float
    answers: int
    used: int
    expected: float
    deviation: float
    deviations: float
    smallest_loss: float
    ways: list[WayRounds]
    doubt: str = ""


Acceptance = Deserved | ServerAcceptance | ExpectedRounds


def conclude(found: Acceptance, folder: Path, *, as_json: bool) -> int:
    """Write acceptance.json and the page into a run folder, and print; the exit code."""
    text = msgspec.json.format(msgspec.json.encode(found)).decode()
    (folder / FACTS).write_text(f"{text}\n", encoding="utf-8")
    write_page(folder, lambda: document_of(found, folder))
    print(text) if as_json else show(text_of(document_of(found, folder), width()))
    return found.exit_code


def acceptance_page(folder: Path) -> Document:
    """The document of a run folder. Raises InputError for facts that cannot be read."""
    of = "the run folder of `eagletwin acceptance`"
    names = read_facts(folder / FACTS, dict[str, Any], of)
    kind: Any = Deserved if "depths" in names else ExpectedRounds if "expected" in names else ServerAcceptance
    return document_of(read_facts(folder / FACTS, kind, of), folder)


def document_of(found: Acceptance, folder: Path) -> Document:
    if isinstance(found, Deserved):
        return _of_pair(found, folder)
    return _of_server(found, folder) if isinstance(found, ServerAcceptance) else _of_chance(found, folder)


def _of_pair(one: Deserved, folder: Path) -> Document:
    shape, (target, draft) = one.shape, one.pair
    drafts = f"chains of {count(shape.num_steps, 'step')}"
    if shape.topk > 1:
        drafts = f"trees of {count(shape.num_steps, 'step')}, topk {shape.topk}, {shape.num_draft_tokens} nodes"
    ties = "no near tie changes that number" if one.fewest == one.most else f"{one.fewest} to {one.most}, as near ties go"
    lines = [
        f"{count(one.texts, 'text')}, {one.tokens} tokens, {one.rounds} rounds of {drafts}: {ties}.",
        f"Near ties leave {one.doubtful:.2%} of {count(one.positions, 'position')} open.",
    ]
    if one.rounds_in_sglang != one.rounds:
        more = one.rounds_in_sglang / one.rounds - 1
        entry = "8409" if shape.topk > 1 else "boundary-kv"
        lines.append(
            f"SGLang needs {one.rounds_in_sglang} rounds ({more:+.1%}), by the layout of its drafted rows: "
            f"`eagletwin info ledger {entry}`."
        )
    if one.off_target:
        said = f"{count(one.off_target, 'token')} of the texts are not what the target says greedily"
        lines.append(f"{said}: texts of somebody else, or sampled.")
    lines += [
        f"WARNING: the head accepts clearly more where the checkpoint is read otherwise, as {name}: its configuration does not "
        "fit it."
        for name in one.better_read_as
    ]
    return Document(
        title=f"accept length {_interval(one.accept_length)}",
        status="deserved",
        headline=f"Tokens a round that {draft} deserves on {target}, the bonus token counted.",
        lines=tuple(lines),
        facts=(("target", target), ("draft", draft)),
        sections=(
            _depths(one),
            DocumentSection(
                heading="Where they are accepted",
                tables=(_parts("length of the prompt", one.by_prompt_length), _parts("place behind the prompt", one.by_place)),
            ),
        ),
        files=(FACTS,),
        folder=str(folder),
    )


def _interval(one: Interval) -> str:
    return f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})"


def _share(one: Interval) -> str:
    return f"{one.value:.1%} ({one.low:.1%} to {one.high:.1%})"


def _depths(one: Deserved) -> DocumentSection:
    rows = ((str(at.depth), _share(at.conditional), _share(at.cumulative), str(at.reached)) for at in one.depths)
    header = ("draft", "accepted, if those before it are", "accepted", "positions")
    line = "Shares are of all positions behind the prompts. In brackets: the interval that holds 95 % of the draws of texts."
    return DocumentSection(
        heading="Drafts accepted, by depth", lines=(line,), tables=(table("Drafts accepted, by depth", header, rows),)
    )


def _parts(what: str, parts: tuple[Span, ...]) -> Table:
    def label(part: Span) -> str:
        return str(part.begin) if part.end - part.begin <= 1 else f"{part.begin} to {part.end - 1}"

    rows = ((label(part), str(part.count), f"{part.accepted:.2f}") for part in parts)
    return table(f"Drafts accepted, by {what}", (what, "positions", "drafts accepted"), rows)


def _of_server(one: ServerAcceptance, folder: Path) -> Document:
    told = [answer for answer in one.answers if not answer.untold]
    fewest, most = (sum(answer.deserved[at] for answer in told) for at in (0, 1))
    deserved = f"{fewest if fewest == most else f'{fewest} to {most}'} rounds deserved"
    shown = one.exit_code != EXIT_DIVERGED and not one.strange
    return Document(
        title=f"{count(len(told), 'answer')}: {deserved}, {sum(answer.used for answer in told)} used",
        status=status_of(one.exit_code),
        headline=_server(one.server),
        lines=tuple(one.remarks),
        facts=tuple((name, str(value)) for name, value in msgspec.to_builtins(one.server).items() if value not in ("", None)),
        sections=(_shares(one), _power(one, brief=None if shown else ""), _answers(one.answers)),
        files=(FACTS,),
        folder=str(folder),
    )


def _server(started: Started) -> str:
    return (
        f"{TITLES[started.engine]} {started.version}, {started.algorithm}, num_steps {started.num_steps}, topk {started.topk}."
    )


def _shares(one: ServerAcceptance) -> DocumentSection:
    def cell(share: AnswerCount) -> str:
        return f"{share.unequal} of {share.count}" if share.count else "no answer"

    rows = ((name, cell(having), cell(lacking)) for name, (having, lacking) in one.shares.items() if one.condition)
    shares = table("Answers that lost rounds", ("condition", "lost with it", "lost without it"), rows)
    return DocumentSection(heading="What the losses have in common", tables=(shares,))


def _power(one: ServerAcceptance, brief: str | None) -> DocumentSection:
    lines = tuple(power_remarks(one.power, one.hidden_bugs))
    tables = (table(CAPTION, HEADER, power_rows(one.power)),)
    return DocumentSection(heading=CAPTION, lines=lines, tables=tables, brief=brief)


def _answers(answers: list[AnswerRounds]) -> DocumentSection:
    rows = []
    for one in answers[:_MOST]:
        said = TableCell(f"cannot be told: {one.untold_cause}") if one.untold else TableCell("none", "right")
        if one.wrong and not one.untold:
            first = ", ".join(
                f"behind {wrong.committed + 1} tokens {wrong.used} accepted, {' or '.join(map(str, wrong.deserved))} deserved"
                for wrong in one.wrong[:3]
            )
            said = TableCell(f"{count(len(one.wrong), 'round')}: {first}", "wrong")
        tag = "not told" if one.untold else "lost" if one.wrong else "not lost"
        band = " to ".join(dict.fromkeys(map(str, one.deserved)))
        cells = (str(one.prompt), one.way, str(one.tokens), str(one.cached), band, str(one.used), said)
        rows.append(row(*cells, tags=(tag,)))
    left = len(answers) - len(rows)
    rounds = table(
        "Rounds by answer",
        ("prompt", "sent", "tokens", "cached", "deserved", "used", "wrong rounds"),
        rows,
        note=f"{left} more are not listed." if left else "",
        filters=(("Rounds", ("lost", "not lost", "not told")),),
        searched=True,
    )
    return DocumentSection(heading="Answers", tables=(rounds,), brief="")


def _of_chance(one: ExpectedRounds, folder: Path) -> Document:
    said = f"{one.expected:.1f} rounds expected, give or take {one.deviation:.1f}; {one.used} used"
    lines = [
        f"More than {MOST_DEVIATIONS:g} standard deviations are no chance: one right server in 16,000 is off so far.",
        f"Smallest loss that shows in 95 of 100 such runs: {one.smallest_loss:.1f} rounds "
        f"({one.smallest_loss / max(one.expected, 1):.1%}).",
    ]
    header = ("prompts were sent", "rounds expected", "used", "standard deviations")
    rows = ((WAYS[way.way], f"{way.expected:.1f}", str(way.used), f"{way.deviations:+.1f}") for way in one.ways)
    return Document(
        title=f"{count(one.answers, 'answer')}: {said} ({one.deviations:+.1f} standard deviations)",
        status=status_of(one.exit_code),
        headline=f"{_server(one.server)[:-1]}, rejection sampling at temperature {one.temperature:g}.",
        lines=(*lines, *filter(None, [one.doubt])),
        sections=(DocumentSection(heading="Rounds", tables=(table("Rounds, by way", header, rows),)),),
        files=(FACTS,),
        folder=str(folder),
    )
