"""What a pair deserves, kept in acceptance.json and on a page that is made of it alone."""

from pathlib import Path

import msgspec
from msgspec import Struct

from eagletwin.harness.core.errors import EXIT_EQUAL
from eagletwin.harness.core.terminal import count
from eagletwin.harness.deserved.statistics import Figures, Interval, Span
from eagletwin.harness.page.render import Page, PageSection, Table, TableCell, write_page

from ..page_facts import read_facts, row
from .report import Deserves

FACTS = "acceptance.json"


class _Drafted(Struct, kw_only=True):
    num_steps: int
    topk: int
    num_draft_tokens: int


class Deserved(Figures, frozen=True, kw_only=True):
    """acceptance.json of a pair without a server. rounds_in_sglang: by the layout of SGLang's drafted rows"""

    pair: tuple[str, str]
    shape: _Drafted
    off_target: int
    better_read_as: list[str]
    rounds_in_sglang: int
    exit_code: int = EXIT_EQUAL


def keep_deserved(deserves: Deserves, pair: tuple[str, str], folder: Path) -> str:
    """Write acceptance.json and its page into a run folder. pair: target and draft as they were typed. Returns what
    acceptance.json has."""
    facts = {
        "exit_code": EXIT_EQUAL,
        "pair": pair,
        "shape": deserves.shape,
        "off_target": deserves.off,
        "better_read_as": [mistake.name for mistake in deserves.better],
        "rounds_in_sglang": deserves.layout or deserves.figures.rounds,
        **msgspec.to_builtins(deserves.figures),
    }
    text = msgspec.json.format(msgspec.json.encode(facts)).decode()
    (folder / FACTS).write_text(f"{text}\n", encoding="utf-8")
    write_page(folder, lambda: deserved_page(folder))
    return text


def deserved_page(folder: Path) -> Page:
    """The page of a run folder. Raises InputError for facts that cannot be read."""
    one = read_facts(folder / FACTS, Deserved, "the run folder of `eagletwin acceptance`")
    shape = one.shape
    drafts = f"chains of {count(shape.num_steps, 'step')}"
    if shape.topk > 1:
        drafts = f"trees of {count(shape.num_steps, 'step')}, topk {shape.topk}, {shape.num_draft_tokens} nodes"
    facts = [
        ("target", one.pair[0]),
        ("draft", one.pair[1]),
        ("drafted", drafts),
        ("texts", f"{one.texts}, {count(one.tokens, 'token')}"),
        ("rounds deserved", _rounds(one)),
        ("left open by near ties", f"{one.doubtful:.2%} of {count(one.positions, 'position')}"),
    ]
    if one.rounds_in_sglang != one.rounds:
        more = one.rounds_in_sglang / one.rounds - 1
        facts.append(("rounds that SGLang needs", f"{one.rounds_in_sglang} ({more:+.1%}), by the layout of its drafted rows"))
    return Page(
        title=f"Acceptance that {one.pair[1]} deserves on {one.pair[0]}",
        status="deserved",
        headline=f"accept length {_interval(one.accept_length)}: tokens a round, the bonus token counted",
        facts=tuple(facts),
        sections=(*_warnings(one), _depths(one), _where(one)),
        files=(FACTS,),
    )


def _warnings(one: Deserved) -> list[PageSection]:
    lines = [
        f"The head accepts clearly more where the checkpoint is read otherwise, as {name}: its configuration does not fit it."
        for name in one.better_read_as
    ]
    if one.off_target:
        said = f"{count(one.off_target, 'token')} of the texts are not what the target says greedily"
        lines.append(f"{said}: texts of somebody else, or sampled.")
    return [PageSection(heading="To be looked at", lines=tuple(lines))] if lines else []


def _rounds(one: Deserved) -> str:
    return str(one.rounds) if one.fewest == one.most else f"{one.rounds}: {one.fewest} to {one.most}, as near ties go"


def _interval(one: Interval) -> str:
    return f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})"


def _share(one: Interval) -> str:
    return f"{one.value:.1%} ({one.low:.1%} to {one.high:.1%})"


def _depths(one: Deserved) -> PageSection:
    rows = tuple(
        row(str(depth.depth), _share(depth.conditional), TableCell(_share(depth.cumulative)), str(depth.reached))
        for depth in one.depths
    )
    header = ("draft", "accepted, if those before it are", "accepted", "positions")
    table = Table(caption="Drafts accepted, by depth", header=header, rows=rows)
    line = "Shares are of all positions behind the prompts. In brackets: the interval that holds 95 % of the draws of texts."
    return PageSection(heading="Draft by draft", lines=(line,), tables=(table,))


def _where(one: Deserved) -> PageSection:
    tables = tuple(
        Table(
            caption=f"Drafts accepted, by {what}",
            header=(what, "positions", "drafts accepted"),
            rows=tuple(row(_range(part), str(part.count), f"{part.accepted:.2f}") for part in parts),
        )
        for what, parts in (("length of the prompt", one.by_prompt_length), ("place behind the prompt", one.by_place))
    )
    return PageSection(heading="Where they are accepted", tables=tables)


def _range(part: Span) -> str:
    return str(part.begin) if part.end - part.begin <= 1 else f"{part.begin} to {part.end - 1}"
