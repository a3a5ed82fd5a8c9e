"""A verdict told as a short argument: what happened, what must hold, why it cannot both be, and how to see it again."""

import textwrap

from eagletwin.harness.judge import LAYER_RULES, RULES, Divergence, Verdict
from eagletwin.harness.models.recipes import RECIPES
from eagletwin.harness.trace import Header, Trace
from eagletwin.harness.words import count

from .tree import draw

_WIDTH = 112

_STAGES = {
    "target.extend": "target prefill",
    "draft.extend": "draft extend (prefill)",
    "prefill": "after draft extend (prefill)",
    "draft.decode": "draft decode",
    "draft": "when draft() returned",
    "target.verify": "target verify",
    "verify": "when verify returned",
    "draft.extend_decode": "draft extend (decode)",
    "extend": "after draft extend (decode)",
    "finished": "end of the request",
    "cached": "prefix cache at the end",
    "kernel": "inside a kernel",
    "batch": "before a batch ran",
    "iteration": "before a scheduler iteration",
    "flushed": "after the cache was flushed",
}


def argue(header: Header, verdict: Verdict, *, again: str = "", trace: Trace | None = None) -> str:
    """The argument, plain text, some ten lines. `again` is the command that repeats the run.

    trace  what the verdict is about: then a divergence in a draft tree comes with a drawing of it
    """
    case, engine = header.case, header.engine
    changed = f", with {', '.join(engine.patches)}" if engine.patches else ""
    mode = (f", {engine.mode}" if engine.mode else "") + (f", {engine.tp} ranks" if engine.tp > 1 else "")
    off = f", not checked: {', '.join(verdict.without)}" if verdict.without else ""
    off += f", judged by {verdict.view}" if verdict.view else ""
    lines = [f"{verdict.status.upper()}  {case.name} on SGLang {engine.version} ({engine.device}{mode}{changed}{off})"]
    if verdict.first is not None:
        lines += ["", *_divergence(verdict.first, case.num_steps, RECIPES[case.model].mtp_layers > 0)]
        drawn = draw(trace.ranks[verdict.first.rank or 0], verdict.first) if trace is not None else []
        lines += ["", *(f"  {line}".rstrip() for line in drawn)] if drawn else []
    if verdict.reason:
        lines += ["", *_fold(f"{verdict.rule or 'cannot tell'}: {verdict.reason}")]
        if verdict.exercised:
            lines += _fold(f"Exercised: {', '.join(verdict.exercised)}.")
    if verdict.later:
        total = sum(verdict.later.values())
        parts = ", ".join(f"{rule} {number}" for rule, number in sorted(verdict.later.items()))
        lines += ["", *_fold(f"After it {count(total, 'more comparison')} diverged, which may follow from it: {parts}.")]
    if header.ending.kind != "finished" and verdict.status == "diverged":
        ended = "" if header.ending.kind == "unseen" else f"the worker {header.ending.kind}: "
        lines += ["", *_fold(f"Then {ended}{header.ending.detail}.")]
    if verdict.status == "equal":
        compared, reached = sum(verdict.checked.values()), ", ".join(verdict.exercised) or "nothing named"
        text = (
            f"{count(compared, 'comparison')} in {count(len(verdict.checked), 'rule')}; "
            f"{count(verdict.choices, 'choice')}, of them {count(verdict.ties, 'tie')}; "
        )
        text += f"largest float error {verdict.headroom:.2g} of its bound. Exercised: {reached}."
        lines += ["", *_fold(text)]
    if verdict.unseen:
        parts = ", ".join(f"{rule} {number}" for rule, number in sorted(verdict.unseen.items()))
        lines += ["", *_fold(f"Not seen (docs/rules.md says why): {parts}.")]
    if again:
        lines += ["", f"  again: {again}"]
    return "\n".join(lines)


def _divergence(found: Divergence, num_steps: int, layers: bool) -> list[str]:
    section, sentence = (RULES | LAYER_RULES if layers else RULES)[found.rule]
    where = f"request {found.request}, round {found.round}, " if found.request else ""
    stage = _STAGES[found.stage]
    if found.stage in ("draft.decode", "draft") and 0 < found.step < num_steps:  # what comes after the last step has no step
        stage = f"draft decode step {found.step}" + (", when draft() returned" if found.stage == "draft" else "")
    if layers and found.rule.startswith("draft.") and found.stage != "draft":
        stage += f", layer {found.layer}"
    where = f"rank {found.rank}, {where}" if found.rank is not None else where
    return [
        f"  {found.rule}",
        f"  at        {where}{stage} (scheduler iteration {found.iteration})",
        f"  index     {found.index}",
        f"  expected  {found.expected}",
        f"  actual    {found.actual}",
        *([*_fold(found.why)] if found.why else []),
        *_fold(f"This breaks docs/design.md {section}: {sentence}"),
    ]


def _fold(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")
