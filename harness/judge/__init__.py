"""The judge: a trace and the reference in, a verdict out. Imports no engine.

story.py says what should have been, rules.py and slots.py compare (compare.py, bounds.py: how), exercise.py says what the
case reached.
"""

import traceback
from collections import Counter

from msgspec.structs import replace

from eagletwin.harness.errors import InputError
from eagletwin.harness.models.weights import model_pair
from eagletwin.harness.trace import Ending, Trace

from .bounds import MAX_TIE_SHARE
from .exercise import exercised
from .rules import Rules
from .story import stories
from .verdict import RULES, Divergence, Verdict

__all__ = ["RULES", "Divergence", "Verdict", "judge"]


def judge(trace: Trace, without: frozenset[str] = frozenset()) -> Verdict:
    """Judge a trace. `without`: rules to leave out. Raises InputError if the trace was made with other weights.

    A judge that cannot make sense of a trace says `unknown`, never `equal`.
    """
    case = trace.header.case
    if trace.header.weights != model_pair(case.model).digest:
        raise InputError(
            f"the trace was made with other weights of {case.model} than this eagletwin makes",
            consequence="there is no reference to judge it by",
            remedy="judge it with the eagletwin and torch versions in its header, or record it again",
        )
    try:
        told = stories(trace)
        findings = Rules(trace, told, without).check()
        reached = exercised(trace, told)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Verdict(
            status="unknown",
            reason=f"the judge failed on this trace: {type(error).__name__}: {error} ({where.filename}:{where.lineno})",
        )
    verdict = Verdict(
        status="equal",
        choices=findings.choices,
        ties=findings.ties,
        exercised=reached,
        checked=dict(findings.checked),
        without=tuple(sorted(without)),
        headroom=findings.headroom,
    )
    found = findings.in_order()
    ending = trace.header.ending
    if ending.kind == "faulted" and ending.rule in RULES and ending.rule not in without:
        found.append(_faulted(ending))  # the run ended there, so everything else was found before
    if found:
        later = dict(Counter(divergence.rule for divergence in found[1:]))
        return replace(verdict, status="diverged", rule=found[0].rule, first=found[0], later=later)
    if ending.kind != "finished":
        rule = "engine.crash" if ending.kind == "crashed" else "engine.hang"
        return replace(verdict, status="unknown", rule=rule, reason=f"{ending.detail} (last seen: {ending.where or 'start'})")
    reason = _not_shown(trace, reached, findings.choices, findings.ties)
    return replace(verdict, status="unknown", reason=reason) if reason else verdict


def _faulted(ending: Ending) -> Divergence:
    return Divergence(
        rule=ending.rule,
        request="",
        round=0,
        stage="kernel",
        step=0,
        iteration=0,
        index=f"last seen: {ending.where}",
        expected="see the rule",
        actual=ending.detail,
    )


def _not_shown(trace: Trace, reached: tuple[str, ...], choices: int, ties: int) -> str:
    """Why a trace without a divergence still does not show that the engine is right; empty if it does."""
    case, stages = trace.header.case, Counter((record.request, record.stage) for record in trace.header.records)
    for request in case.requests:
        if not stages[request.id, "finished"] or not stages[request.id, "prefill"]:
            return f"request {request.id} did not run to its end"
        if len({stages[request.id, stage] for stage in ("draft", "verify", "extend")}) > 1:
            return f"request {request.id} has rounds without a draft, a verify or a draft extend"
        if trace.header.inner:
            chunks, rounds = stages[request.id, "prefill"], stages[request.id, "draft"]
            due = {
                "target.extend": chunks,
                "draft.extend": chunks,
                "draft.decode": rounds * (case.num_steps - 1),
                "target.verify": rounds,
                "draft.extend_decode": rounds,
            }
            for stage, count in due.items():
                if stages[request.id, stage] != count:
                    return f"request {request.id} has {stages[request.id, stage]} records of {stage}, not {count}"
    if not stages["", "flushed"]:
        return "the pools were never flushed and counted"
    missing = [name for name in case.exercises if name not in reached]
    if missing:
        return f"the case is for {missing[0]!r}, which did not happen"
    if ties > max(1, MAX_TIE_SHARE * choices):
        return f"{ties} of {choices} choices are ties"
    return ""
