"""The section of a search's page that says who ran it: of a campaign alone."""

from msgspec import Struct

from eagletwin.harness.core.terminal import count
from eagletwin.harness.page.render import PageSection, Table

from ..page_facts import row


class LegDone(Struct, kw_only=True):
    """What was done of one leg. closed: why its SGLang would not start."""

    leg: str
    cases: int
    blocks: int
    statuses: dict[str, int] = {}
    closed: str = ""


class CampaignDone(Struct, kw_only=True):
    """How a campaign went.

    nodes   workers that were up, by their machine; deaths: how many of them ended
    drivers that worked on it, one after the other
    again   cases that may have run twice, at most
    lost    what was given up, and why
    """

    legs: list[LegDone]
    nodes: dict[str, int]
    deaths: int
    drivers: int
    again: int
    lost: dict[str, str] = {}

    @property
    def sentence(self) -> str:
        workers = sum(self.nodes.values())
        parts = f"{count(workers, 'worker')} on {count(len(self.nodes), 'machine')}"
        parts += f", of which {self.deaths} ended before it was over" if self.deaths else ""
        parts += f"; {count(self.drivers, 'driver')}, one after the other" if self.drivers > 1 else ""
        return f"{parts}. At most {count(self.again, 'case')} ran twice."


def campaign_sections(done: CampaignDone) -> list[PageSection]:
    """Who ran it, what of it, and what was given up."""
    legs = [
        row(
            one.leg,
            str(one.cases),
            str(one.blocks),
            ", ".join(f"{number} {name}" for name, number in sorted(one.statuses.items())),
            one.closed.partition("\n")[0],
        )
        for one in done.legs
    ]
    header = ("SGLang", "cases", "blocks", "came to", "would not start")
    tables = [Table(caption="What was searched", header=header, rows=tuple(legs))]
    if done.lost:
        rows = tuple(row(what, why) for what, why in done.lost.items())
        tables.append(Table(caption="Given up, and so not looked at", header=("what", "why"), rows=rows))
    machines = tuple(row(name, str(number)) for name, number in done.nodes.items())
    tables.append(Table(caption="Machines", header=("machine", "workers"), rows=machines))
    return [PageSection(heading="The campaign", lines=(done.sentence,), tables=tuple(tables))]
