"""How much of each request was compared, and the least that `equal` takes. Called by judge.py.

A comparison that was not made changes no status by itself: another may stand in for it, as stored rows do for what a CUDA graph
hides. Where none was made of a whole stage of a request, or of a family of rules (all `draft.*`), nothing stands in.
"""

from collections.abc import Iterator

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.verdict import RequestShare

from .compare import Findings, Scope

# What a case names in `exercises` if nothing, or not all, of what it asks for can be judged.
DECLARES = "impossible"
# Stages of a request. The records of all others serve rules that look at several of them.
_WORK = (
    "target.extend",
    "draft.extend",
    "prefill",
    "draft.decode",
    "draft",
    "target.verify",
    "verify",
    "draft.extend_decode",
    "extend",
    "finished",
)


def shares(case: Case, findings: Findings) -> dict[str, RequestShare]:
    """By request, in the order of the case."""
    return {request.id: _share(findings, request.id) for request in case.requests}


def _share(findings: Findings, request: str) -> RequestShare:
    whole, rows = Scope(), Scope()
    for (name, stage), scope in findings.scopes.items():
        if name == request:
            whole += scope
            rows += scope if stage in ("target.extend", "extend") else Scope()
    rounds = findings.scopes.get((request, "verify"), Scope())
    wanted = {*whole.checked, *whole.unseen, *whole.unjudged}
    return RequestShare(
        rounds=rounds.records,
        rounds_compared=rounds.compared,
        rows=rows.rows,
        rows_compared=rows.rows_compared,
        rules=len(wanted),
        never=tuple(sorted(wanted - {*whole.checked})),
    )


def gap(case: Case, findings: Findings, *, every: bool) -> str:
    """What was never compared though the case ran it, and is not declared; empty: nothing.

    A request that asks for what cannot be declares so itself beside another of which the same was compared. A case of such
    requests alone has to name DECLARES. every: whether each record of _WORK has something to compare: not where rules are
    switched off, nor in a recording of integers
    """
    parts = _parts(findings)
    for (request, part), scope in parts.items():
        left = sorted({*scope.unseen, *scope.unjudged})
        if scope.checked or not (left or (scope.records and every)):
            continue
        never = f"{part} of {f'request {request}' if request else 'the scheduler'} was never compared"
        if request not in findings.impossible or not left or scope.unseen:
            return f"{never}: {', '.join(left) or 'its numbers'} could not be seen"
        beside = any(other.checked for (name, same), other in parts.items() if name and same == part and name != request)
        if not beside and DECLARES not in case.exercises:
            why = f"what the request asks for allows no token, and the case does not name {DECLARES!r} in `exercises`"
            return f"{never} ({', '.join(left)}): {why}"
    return ""


def _parts(findings: Findings) -> dict[tuple[str, str], Scope]:
    """The comparisons by request, and of each by stage and by family of rules."""
    parts = dict[tuple[str, str], Scope]()
    for (request, stage), scope in findings.scopes.items():
        of_stage = [(f"stage {stage}", scope)] if stage in _WORK else []
        for part, own in (*of_stage, *_families(scope)):
            whole = parts.setdefault((request, part), Scope())
            whole += own
    return parts


def _families(scope: Scope) -> Iterator[tuple[str, Scope]]:
    for counts in ("checked", "unseen", "unjudged"):
        for rule, number in getattr(scope, counts).items():
            own = Scope()
            getattr(own, counts)[rule] = number
            yield f"{rule.partition('.')[0]}.*", own
