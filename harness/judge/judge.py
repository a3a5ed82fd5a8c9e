"""A trace in, a verdict out: the comparisons of all ranks, then what keeps a trace without a divergence from being equal.

Each record goes to the rules that look at its stage. compare.py says how numbers are compared, replay.py what they must be,
rules/ which must be equal.
"""

import traceback
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from msgspec import UNSET
from msgspec.structs import replace

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import unknown_changes
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.records import Header, Record
from eagletwin.harness.core.trace import INNER, Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW, MOST_EXCUSES, Divergence, Excuse, RequestShare, Verdict, View
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.dimensions import FEATURES
from eagletwin.harness.families.weights import model_pair

from . import rules
from .bounds import FLOAT32, bounds_of, quiet_arithmetic
from .compare import Findings, Scope, divergence_of
from .completeness import absent_number, find_gaps, missing
from .context import Context, Rules
from .experts import Nudge, Ties, follows_from_experts, nudges
from .features import exercised_features
from .model import model_of
from .ranks import merge_ranks, unlike
from .replay import NoReference, RequestReplay, replay_requests
from .rules import catalogue
from .rules.sessions import with_full_prompts

# The order of the rules that look at one record: of two divergences at one place the first one's is the cause. Files that are
# not named here come last.
_ORDER = "inputs slots grammars sampling verify events outputs messages prefix_cache cached_rows states".split()  # noqa: SIM905


@cache
def methods() -> list[tuple[str, type[Rules], str]]:
    """Stage, class and name of each method that judges a record, in order."""
    names = sorted(one.name for one in iter_modules(rules.__path__))
    modules = [import_module(f"{rules.__name__}.{name}") for name in (*_ORDER, *(one for one in names if one not in _ORDER))]
    kinds = [kind for one in modules for kind in vars(one).values() if getattr(kind, "__module__", "") == one.__name__]
    own = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Rules)]
    return [
        (stage, kind, name) for kind in own for name, method in vars(kind).items() for stage in getattr(method, "stages", ())
    ]


def _check_records(trace: Trace, replays: dict[str, RequestReplay], without: frozenset[str], view: View) -> Findings:
    """The comparisons of one trace. `without`: rules that are switched off; view: that of the replays."""
    context = Context(trace, replays, without, view)
    for name, one in context.impossible.items():
        context.compare.asks_the_impossible(name, one.token)
    checks: dict[str, list[Callable[..., None]]] = {}
    for stage, kind, name in methods():
        checks.setdefault(stage, []).append(getattr(context.of(kind), name))
    for number, record in enumerate(trace.header.records):
        impossible = context.impossible.get(record.request)
        behind = impossible is not None and number > impossible.number
        with context.compare.looking_at(record, context.committed_rows(number, record), away=behind):
            for check in checks[record.stage]:
                check(number, record)
    for check in checks["end"]:
        check()
    return context.compare.finish()


# Why numbers that are not the reference's own are no divergences: what a verdict names and counts.


def of_experts(ties: Ties) -> Excuse:
    if isinstance(ties, Nudge):
        return Excuse(kind="nudge", part=ties.part, expert=ties.expert, size=ties.size)
    return Excuse(kind="experts")


def excuses(findings: Findings, reached: tuple[str, ...], view: View) -> tuple[dict[str, int], tuple[Excuse, ...]]:
    """How many there are of each kind, and the first of them in the order in which data flows."""
    every = [excuse for _, excuse in sorted(findings.excuses, key=lambda pair: pair[0])]
    # the views in which what the engine does counts as right, where the case reached what they differ in from the papers
    used: dict[View, bool] = {
        "slot_layout": view != "true_tree" and "branch_changes_parent" in reached,
        "last_fed": view != "committed" and "look_ahead_rejected" in reached,
        "shifted": view == "shifted",
    }
    every += [Excuse(kind="view", view=name) for name, counts in used.items() if counts]
    return dict(Counter(excuse.kind for excuse in every)), tuple(every[:MOST_EXCUSES])


# How much of each request was compared, and the least that `equal` takes.
#
# A comparison that was not made changes no status by itself: another may stand in for it, as stored rows do for what a CUDA
# graph hides. Where none was made of a whole stage of a request, or of a family of rules (all `draft.*`), nothing stands in.

# What a case names in `exercises` if nothing, or not all, of what it asks for can be judged.
DECLARES = "impossible"
# Stages of a request. The records of all others serve rules that look at several of them.
_WORK = (*INNER, "prefill", "draft", "verify", "extend", "finished")


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
        if stage in _WORK:
            whole = parts.setdefault((request, f"stage {stage}"), Scope())
            whole += scope
        for counts in ("checked", "unseen", "unjudged"):
            for rule, number in getattr(scope, counts).items():
                family = parts.setdefault((request, f"{rule.partition('.')[0]}.*"), Scope())
                getattr(family, counts)[rule] += number
    return parts


# Of the distributions that verify sampled from, the share for which it may be open where top_k and top_p cut: what would be
# judged in the others is little then, and a request whose cuts were forgotten could pass. Float32's roundings leave it open in
# one of three thousand.
_MAX_CUTS_SHARE = 0.25

# Ways to run kernels that are chosen for the sake of the rules kernel.*: a kernel that they do not cover is a gap there.
_KERNELS_CHECKED = ("checked", "shadow")


def judge(trace: Trace, without: frozenset[str] = frozenset(), view: View = DECLARED_VIEW) -> Verdict:
    """Judge a trace. Raises InputError if the trace was made with other weights.

    without  rules to leave out
    view     one of the two in which what is declared is right, or one in which it is not

    A judge that cannot make sense of a trace says `unknown`, never `equal`.
    """
    model = trace.header.case.model
    if model_of(trace.header).numbers and trace.header.weights != model_pair(model).digest:
        raise InputError(
            f"the trace was made with other weights of {model} than this eagletwin makes",
            consequence="the reference cannot compute what this trace should hold",
            remedy="judge it with the eagletwin and torch versions in its header, or record it again",
        )
    rule, end = _unusual_end(trace.header)
    if absent := next(filter(None, map(absent_number, trace.ranks)), ""):
        return Verdict(status="unknown", rule=rule, reason=end or f"the trace is not complete: {absent}")
    trace = with_full_prompts(trace)
    if blank := next(filter(None, map(find_gaps, trace.ranks)), ""):
        return Verdict(status="unknown", rule=rule, reason=end or blank)
    try:
        findings, by_rank = _with_ties_of_experts(trace, without, view)
        with quiet_arithmetic():
            each = zip(trace.ranks, by_rank, strict=True)
            seen = {name for one in each for name in exercised_features(*one)}
            reached = tuple(name for name in FEATURES if name in seen)
    except NoReference as error:
        return Verdict(status="unknown", rule=rule, reason=end or str(error), undecided=not end)
    except Exception as error:
        failure = _judge_failure(error)
        return Verdict(status="unknown", rule=rule, reason=f"{end}; {failure}" if end else failure)
    verdict = _without_divergence(trace.header, findings, reached, without, view)
    divergences = all_divergences(trace, findings, without)
    if divergences:
        later = dict(Counter(divergence.rule for divergence in divergences[1:]))
        return replace(verdict, status="diverged", rule=divergences[0].rule, first=divergences[0], later=later)
    if end:
        return replace(verdict, status="unknown", rule=rule, reason=end)
    try:
        doubt = _reason_for_doubt(trace, verdict, view)
    except Exception as error:
        doubt = _judge_failure(error)
    undecided = "" if doubt else _why_undecided(trace, verdict)
    reason = doubt or undecided or verdict.gap or _missing_feature(trace, reached)
    if not reason:
        unseen = [change.headline for change in trace.changes if change.headline]
        if all(change.patch for change in trace.changes) and (unknown := unknown_changes(trace.header.engine.version)):
            unseen.append(unknown)
        return replace(verdict, not_seen="; ".join(unseen))
    vacuous = not doubt and not undecided
    return replace(verdict, status="unknown", reason=reason, vacuous=vacuous, undecided=bool(undecided))


def all_divergences(trace: Trace, findings: Findings, without: frozenset[str]) -> list[Divergence]:
    """In the order in which data flows: all that was compared came before the fault of a kernel that ended the run."""
    ending, found = trace.header.ending, findings.in_order()
    if ending.kind == "faulted" and ending.rule in catalogue() and ending.rule not in without:
        kernel = Record(request="", round=0, stage="kernel")
        found.append(divergence_of(kernel, ending.rule, f"last seen: {ending.where}", "see the rule", ending.detail))
    return found


def _with_ties_of_experts(trace: Trace, without: frozenset[str], view: View) -> tuple[Findings, list[dict[str, RequestReplay]]]:
    """The comparisons, with ties in choices of experts decided as the engine decided them, if that makes all of them good."""
    findings, by_rank = compare_trace(trace, without, view)
    divergences = findings.in_order()
    if not divergences or not model_of(trace.header).numbers:
        return findings, by_rank
    header = trace.header
    bounds = bounds_of(header.engine.dtype, header.case.model)
    told: tuple[Ties, ...] = ("as the trace",) if any("experts" in record.tensors for record in header.records) else ()
    asked, exact, moved = RECIPES[header.case.model], by_rank, dict[Nudge, bool]()
    for ties in (*told, *nudges(asked, divergences[0].rule, bounds)):
        if isinstance(ties, Nudge):
            largest = Nudge(ties.part, ties.expert, bounds.tie)
            if largest not in moved:
                moved[largest] = _moves(trace, view, exact, largest)
            if not moved[largest]:
                continue
        others, by_rank_so = compare_trace(trace, without, view, ties)
        others.excuses.append(((), of_experts(ties)))
        if not others.divergences or (ties == "as the trace" and _right_in_each_life(trace, without, view, others, by_rank_so)):
            others.divergences, others.exhibits = [], {}
            others.choices, others.ties, others.adopted = others.choices + 1, others.ties + 1, others.adopted + 1
            return others, by_rank_so
        if ties == "as the trace":
            findings, by_rank = others, by_rank_so
            again = next((replay.name for replays in by_rank for replay in replays.values() if replay.rerouted), "")
            decided = bounds is FLOAT32 and asked.target.index is None  # of FP8, ties are as common as in bfloat16
            if again and not decided and follows_from_experts(findings.in_order()[0].rule):
                raise NoReference(f"rows of request {again} were computed twice, and chose otherwise the second time")
    return findings, by_rank


def _right_in_each_life(
    trace: Trace, without: frozenset[str], view: View, last: Findings, by_rank: list[dict[str, RequestReplay]]
) -> bool:
    """Whether choices of earlier lives explain what diverges from the reference of each request's last one: in each life of a
    request one reference has all numbers. Its answers may come from an earlier life, and follow one life as a whole."""
    lives = {name: replay.lives for replays in by_rank for name, replay in replays.items()}

    def wrong(findings: Findings) -> set[tuple[str, int]]:
        each = (divergence for _, divergence in findings.divergences)
        return {
            (one.request, -1 if one.stage == "finished" else bisect_right(lives.get(one.request, ()), one.iteration))
            for one in each
        }

    left = wrong(last)
    for life in range(max(map(len, lives.values()), default=0)):
        left &= wrong(compare_trace(trace, without, view, life)[0])
    return not left


def _moves(trace: Trace, view: View, exact: list[dict[str, RequestReplay]], nudge: Nudge) -> bool:
    """Whether the reference says anything else with a nudge: if not, no choice of experts is another, and none is with a
    smaller nudge of the same expert."""
    with quiet_arithmetic():
        nudged = [replay_requests(rank, view, nudge) for rank in trace.ranks]
    pairs = ((replay, of_rank[name]) for of_rank, before in zip(nudged, exact, strict=True) for name, replay in before.items())
    return any(replay.said() != other.said() for replay, other in pairs)


def compare_trace(
    trace: Trace, without: frozenset[str], view: View, ties: Ties = None
) -> tuple[Findings, list[dict[str, RequestReplay]]]:
    """The comparisons of all ranks, and of each rank the replays by request. Raises whatever a trace without sense leads to.

    ties: how ties in choices of experts are decided, where not as they are
    """
    with quiet_arithmetic():
        by_rank = [replay_requests(rank, view, ties) for rank in trace.ranks]
        each = [_check_records(rank, of_rank, without, view) for rank, of_rank in zip(trace.ranks, by_rank, strict=True)]
        return merge_ranks(trace, each, without), by_rank


def _without_divergence(
    header: Header, findings: Findings, reached: tuple[str, ...], without: frozenset[str], view: View
) -> Verdict:
    excused, first = excuses(findings, reached, view)
    return Verdict(
        status="equal",
        choices=findings.choices,
        ties=findings.ties,
        adopted=findings.adopted,
        relaxed=findings.relaxed,
        exercised=reached,
        checked=findings.total("checked"),
        unseen=findings.total("unseen"),
        impossible=findings.impossible,
        unjudged=findings.total("unjudged"),
        shares=shares(header.case, findings),
        gap=gap(header.case, findings, every=not without and model_of(header).numbers),
        excused=excused,
        excuses=first,
        without=tuple(sorted(without)),
        view="" if view in (DECLARED_VIEW, "last_fed") else view,
        headroom=findings.headroom,
    )


def _judge_failure(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"the judge failed on this trace: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"


def _unusual_end(header: Header) -> tuple[str, str]:
    """Rule and reason of a run that did not finish; two empty strings for a run that did.

    A recording of a server may stop before its request ends: what is in it is whole.
    """
    ending = header.ending
    if ending.kind == "finished" or (ending.kind == "stopped" and not model_of(header).numbers):
        return "", ""
    if ending.kind == "stopped":
        return "", f"the run was stopped {ending.detail}"
    rule = {"crashed": "engine.crash", "hung": "engine.hang", "faulted": ending.rule, "unseen": ""}[ending.kind]
    return rule, f"{ending.detail} (last seen: {ending.where or 'start'})"


def _reason_for_doubt(trace: Trace, verdict: Verdict, view: View) -> str:
    """Why a trace without a divergence still does not show that the engine is right; empty if it does."""
    difference = unlike(trace)
    if difference:
        return f"the traces are not of all ranks of one run: {difference}"
    for rank, one in enumerate(trace.ranks):
        gap = missing(one, model_of(one.header, view))
        if gap:
            return f"the trace{f' of rank {rank}' if trace.others else ''} is not complete: {gap}"
    abortable = {event.request for event in trace.header.case.events if event.kind == "abort"}
    abortable |= verdict.impossible.keys()  # its grammar refuses whatever token it was given
    for record in trace.header.records if model_of(trace.header).numbers else ():  # a server's clients may hang up
        if record.stage == "finished" and record.numbers["aborted"] and record.request not in abortable:
            return f"the scheduler aborted request {record.request} before its end"
    unchecked = [name for one in trace.processes for name in one.header.fallbacks]
    of_kernels = {rule for rule in catalogue() if rule.startswith("kernel.")} if unchecked else set[str]()
    if of_kernels - {*verdict.without} and trace.header.engine.kernels in _KERNELS_CHECKED:
        return f"kernel {unchecked[0]}: not every rule kernel.* was checked there"
    if not any(verdict.checked.values()):
        return "nothing was compared" + (": every rule that this trace could break is switched off" if verdict.without else "")
    return ""


def _why_undecided(trace: Trace, verdict: Verdict) -> str:
    """Why too few of the comparisons could have failed; empty if enough of them could."""
    if not model_of(trace.header).numbers:
        return ""
    bounds = bounds_of(trace.header.engine.dtype, trace.header.case.model)
    cut, compared = (counts.get("verify.probabilities", 0) for counts in (verdict.unseen, verdict.checked))
    if cut > max(1, _MAX_CUTS_SHARE * compared):
        return f"where top_k and top_p cut cannot be told of {cut} distributions, within the roundings of float32"
    if verdict.ties > max(1, bounds.tie_share * verdict.choices):
        return f"{verdict.ties} of {verdict.choices} choices are ties"
    if verdict.adopted > max(1, bounds.adopted_share * verdict.choices):
        return f"{verdict.adopted} of {verdict.choices} choices are ties that the engine decided otherwise"
    return ""


def _missing_feature(trace: Trace, reached: tuple[str, ...]) -> str:
    """Why the run missed its purpose (a patch that was never called, no change run, a feature not exercised); else empty."""
    if trace.header.idle_edits and trace.header.patched is UNSET:  # an older trace
        return f"the patch edits {trace.header.idle_edits[0]}, which was never called"
    patches = set(trace.header.idle_edits)
    for change in trace.changes:
        if change.doubt and (not change.patch or patches.issuperset(change.functions)):
            return change.doubt
    unreached = [name for name in trace.header.case.exercises if name not in reached]
    return f"the case is for {unreached[0]!r}, which did not happen" if unreached else ""
