"""What `eagletwin acceptance` prints of the figures that a pair deserves."""

from collections.abc import Sequence
from dataclasses import dataclass

from eagletwin.harness.core.terminal import count, show
from eagletwin.harness.deserved.follow import Shape
from eagletwin.harness.deserved.misconfiguration import Mistake
from eagletwin.harness.deserved.statistics import Figures, Interval, Span

from ..tables import print_table


@dataclass(frozen=True, slots=True)
class Deserves:
    """What a pair deserves on some texts.

    layout  rounds as SGLang's layout of drafted rows has it; 0: it makes no difference
    off     tokens of the texts that the target itself would not have said
    better  readings of the checkpoint with which the head accepts clearly more
    """

    figures: Figures
    shape: Shape
    layout: int
    off: int
    better: Sequence[Mistake]


def print_figures(deserves: Deserves) -> None:
    """The figures, for a terminal."""
    found, shape, layout, off = deserves.figures, deserves.shape, deserves.layout, deserves.off
    tree = f"chains of {count(shape.num_steps, 'step')}"
    if shape.topk > 1:
        tree = f"trees of {count(shape.num_steps, 'step')}, topk {shape.topk}, {shape.num_draft_tokens} nodes"
    show(
        f"accept length {_interval(found.accept_length)} deserved\n\n"
        f"  {count(found.texts, 'text')}, {found.tokens} tokens, {found.rounds} rounds of {tree}\n"
        f"  {_band(found)}; near ties leave {found.doubtful:.2%} of {found.positions} positions open"
    )
    if layout:
        print(
            f"  SGLang needs {layout} rounds ({layout / found.rounds - 1:+.1%}) by the layout of its drafted rows: "
            f"eagletwin info ledger {'8409' if shape.topk > 1 else 'boundary-kv'}"
        )
    if off:
        print(f"  {off} tokens are not what the target says greedily: texts of somebody else, or sampled")
    for mistake in deserves.better:
        print(f"  WARNING  the head accepts clearly more as if {mistake.says}: the checkpoint's configuration does not fit it")
    print()
    print_table(
        ("draft", "accepted, if those before it are", "accepted", "positions"),
        [(str(depth.depth), _share(depth.conditional), _share(depth.cumulative), str(depth.reached)) for depth in found.depths],
    )
    for title, parts in (("length of the prompt", found.by_prompt_length), ("place behind the prompt", found.by_place)):
        print_table(
            (title, "positions", "drafts accepted"), [(_range(part), str(part.count), f"{part.accepted:.2f}") for part in parts]
        )


def _band(found: Figures) -> str:
    if found.fewest == found.most:
        return "no near tie changes that number"
    return f"{found.fewest} to {found.most} rounds, as near ties go"


def _interval(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _share(interval: Interval) -> str:
    return f"{interval.value:.1%} ({interval.low:.1%} to {interval.high:.1%})"


def _range(part: Span) -> str:
    return str(part.begin) if part.end - part.begin <= 1 else f"{part.begin} to {part.end - 1}"
