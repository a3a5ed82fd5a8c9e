"""The page of `eagletwin acceptance`, from acceptance.json alone: of a server, rounds deserved and used, answer by answer."""

from pathlib import Path
from typing import Any

import msgspec

from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, InputError
from eagletwin.harness.core.terminal import count
from eagletwin.harness.deserved.statistics import Power
from eagletwin.harness.page.render import Page, PageSection, Table, TableCell, TableRow

from ..page_facts import read_facts, row
from .deserved_page import FACTS, deserved_page
from .power import CAPTION, HEADER, power_remarks, power_rows

_MOST = 2000  # answers that are listed


def acceptance_page(folder: Path) -> Page:
    """The page of a run folder, also of one without a server. Raises InputError for facts that cannot be read."""
    facts = read_facts(folder / FACTS, dict[str, Any], "the run folder of `eagletwin acceptance`")
    if "depths" in facts:
        return deserved_page(folder)
    if "answers" not in facts:
        raise InputError(
            f"{folder / FACTS} has no answers",
            consequence="no page was made",
            remedy="name the run folder of `eagletwin acceptance`",
        )
    status = {EXIT_EQUAL: "equal", EXIT_DIVERGED: "diverged"}.get(facts.get("exit_code", -1), "unknown")
    answers = [one for one in _listed(facts.get("answers")) if isinstance(one, dict)]
    known = {"answers", "exit_code", "server", "power", "hidden_bugs"}
    plain = [(name, _text(value)) for name, value in facts.items() if name not in known and value not in ("", [], None)]
    server = facts.get("server")
    plain += [(f"server: {name}", _text(value)) for name, value in server.items()] if isinstance(server, dict) else []
    return Page(
        title=f"Acceptance {folder.name}",
        status=status,
        headline=_headline(answers),
        facts=tuple(plain),
        sections=(*_power(facts), *((PageSection(heading="Answers", tables=(_answers(answers),)),) if answers else ())),
        files=(FACTS,),
    )


def _power(facts: dict[str, Any]) -> list[PageSection]:
    """Facts from before this was kept have none."""
    if "power" not in facts:
        return []
    power = msgspec.convert(facts["power"], Power)
    table = Table(caption=CAPTION, header=HEADER, rows=tuple(row(*cells) for cells in power_rows(power)))
    lines = tuple(power_remarks(power, facts.get("hidden_bugs", {})))
    return [PageSection(heading="How small a loss would show", lines=lines, tables=(table,))]


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _band(answer: dict[str, Any]) -> str:
    deserved = _listed(answer.get("deserved"))
    return " to ".join(dict.fromkeys(map(str, deserved))) if deserved else ""


def _headline(answers: list[dict[str, Any]]) -> str:
    used = sum(one["used"] for one in answers if isinstance(one.get("used"), int))
    told = [one for one in answers if not one.get("untold")]
    lost = sum(bool(one.get("wrong")) for one in told)
    left = f"; {len(answers) - len(told)} of which it cannot be told" if len(told) < len(answers) else ""
    text = f"{count(len(answers), 'answer')}, {used} rounds used; {lost} with rounds that accepted another number than they may"
    return text + left


def _answers(answers: list[dict[str, Any]]) -> Table:
    rows = []
    for one in answers[:_MOST]:
        untold = bool(one.get("untold"))
        wrong = [] if untold else _listed(one.get("wrong"))
        cells = [TableCell(_text(one.get(name, ""))) for name in ("prompt", "way", "tokens", "cached")]
        told = f"cannot be told: {_text(one.get('untold_cause', ''))}" if untold else "none"
        said = f"{count(len(wrong), 'round')}: {_text(wrong[:3])}" if wrong else told
        look = "wrong" if wrong else "" if untold else "right"
        cells += [TableCell(_band(one)), TableCell(_text(one.get("used", ""))), TableCell(said, look)]
        rows.append(TableRow(tuple(cells), tags=("lost" if wrong else "not told" if untold else "not lost",)))
    left = len(answers) - len(rows)
    return Table(
        caption="Rounds by answer",
        header=("prompt", "sent", "tokens", "cached", "deserved", "used", "wrong rounds"),
        rows=tuple(rows),
        note=f"{left} more are not listed." if left else "",
        filters=(("Rounds", ("lost", "not lost", "not told")),),
        searched=True,
    )
