"""The judge: a trace and the reference in, a verdict out. Imports no engine.

story.py says what should have been, rules.py and slots.py compare (compare.py, bounds.py: how; ranks.py: of several ranks),
exercise.py says what the case reached.
"""

import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from msgspec.structs import replace

from eagletwin.harness.errors import InputError
from eagletwin.harness.models.weights import model_pair
from eagletwin.harness.trace import Ending, Trace
from eagletwin.harness.verdict import DECLARED_VIEW, LAYER_RULES, RULES, Divergence, Verdict, View

from .bounds import bounds_of
from .complete import missing
from .exercise import exercised
from .ranks import together, unlike
from .rules import Rules
from .story import stories

__all__ = ["DECLARED_VIEW", "LAYER_RULES", "RULES", "Divergence", "Verdict", "View", "judge"]

# Of the distributions that verify sampled from, the share for which the bound may leave open where top_k and top_p cut: what
# would be judged in the others is little then, and a request whose cuts were forgotten could pass.
_MAX_CUTS_SHARE = 0.25


def judge(trace: Trace, without: frozenset[str] = frozenset(), view: View = DECLARED_VIEW) -> Verdict:
    """Judge a trace. Raises InputError if the trace was made with other weights.

    without  rules to leave out
    view     one of the two in which what is declared is right, or one in which it is not

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
        # what autograd keeps of a view costs as much as the view; what is not finite is compared, and not warned of
        with _one_thread(), torch.inference_mode(), np.errstate(all="ignore"):
            told = [stories(rank, "true_tree" if view == "true_tree" else "slot_layout") for rank in trace.ranks]
            each = [
                Rules(rank, story, without, "committed" if view == "committed" else "last_fed").check()
                for rank, story in zip(trace.ranks, told, strict=True)
            ]
            findings = together(trace, each, without)
            reached = exercised(trace, told[0])
    except Exception as error:
        reason = _failed(error)
        rule, ended = _ended(trace.header.ending)
        return Verdict(status="unknown", rule=rule, reason=f"{ended}; {reason}" if ended else reason)
    verdict = Verdict(
        status="equal",
        choices=findings.choices,
        ties=findings.ties,
        adopted=findings.adopted,
        exercised=reached,
        checked=dict(findings.checked),
        unseen=dict(findings.unseen),
        without=tuple(sorted(without)),
        view="" if view in (DECLARED_VIEW, "last_fed") else view,
        headroom=findings.headroom,
    )
    found = findings.in_order()
    ending = trace.header.ending
    if ending.kind == "faulted" and ending.rule in RULES and ending.rule not in without:
        found.append(_faulted(ending))  # the run ended there, so everything else was found before
    if found:
        later = dict(Counter(divergence.rule for divergence in found[1:]))
        return replace(verdict, status="diverged", rule=found[0].rule, first=found[0], later=later)
    rule, ended = _ended(ending)
    if ended:
        return replace(verdict, status="unknown", rule=rule, reason=ended)
    try:
        doubt = _doubt(trace, verdict)
    except Exception as error:
        doubt = _failed(error)
    reason = doubt or _unreached(trace, reached)
    return replace(verdict, status="unknown", reason=reason, vacuous=not doubt) if reason else verdict


_lock = threading.Lock()
_judging: list[int] = []  # of each judge that is at work, how many threads there were before the first


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch computes in this thread alone: a case's tensors are so small that others gain nothing, and where there are fewer
    cores than threads, as in a container or with pytest -n, their waiting for each other took 500 ms of a case instead of 6."""
    with _lock:  # another thread may be judging: what it set is not what was there before
        threads = _judging[0] if _judging else torch.get_num_threads()
        _judging.append(threads)
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            torch.set_num_threads(_judging.pop())


def _failed(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"the judge failed on this trace: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"


def _ended(ending: Ending) -> tuple[str, str]:
    """Rule and reason of a run that did not come to its end; two empty strings for one that did."""
    if ending.kind == "finished":
        return "", ""
    if ending.kind == "stopped":
        return "", f"the run was stopped {ending.detail}"
    rule = {"crashed": "engine.crash", "hung": "engine.hang", "faulted": ending.rule, "unseen": ""}[ending.kind]
    return rule, f"{ending.detail} (last seen: {ending.where or 'start'})"


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


def _doubt(trace: Trace, verdict: Verdict) -> str:
    """Why a trace without a divergence still does not show that the engine is right; empty if it does."""
    apart = unlike(trace)
    if apart:
        return f"the traces are not of all ranks of one run: {apart}"
    for rank, one in enumerate(trace.ranks):
        gap = missing(one)
        if gap:
            return f"the trace{f' of rank {rank}' if trace.others else ''} is not complete: {gap}"
    asked = {event.request for event in trace.header.case.events if event.kind == "abort"}
    for record in trace.header.records:
        if record.stage == "finished" and record.numbers["aborted"] and record.request not in asked:
            return f"the scheduler aborted request {record.request} before its end"
    bounds = bounds_of(trace.header.engine.dtype, trace.header.case.model)
    cut, compared = (counts.get("verify.probabilities", 0) for counts in (verdict.unseen, verdict.checked))
    if cut > max(1, _MAX_CUTS_SHARE * compared):
        return (
            f"where top_k and top_p cut cannot be told of {cut} distributions, within the bound of {trace.header.engine.dtype}"
        )
    if verdict.ties > max(1, bounds.tie_share * verdict.choices):
        return f"{verdict.ties} of {verdict.choices} choices are ties"
    if verdict.adopted > max(1, bounds.adopted_share * verdict.choices):
        return f"{verdict.adopted} of {verdict.choices} choices are ties that the engine decided otherwise"
    return ""


def _unreached(trace: Trace, reached: tuple[str, ...]) -> str:
    """What the run was for and did not reach; empty if it reached all of it."""
    if trace.header.idle_edits:
        return f"the patch edits {trace.header.idle_edits[0]}, which was never called"
    unreached = [name for name in trace.header.case.exercises if name not in reached]
    return f"the case is for {unreached[0]!r}, which did not happen" if unreached else ""
