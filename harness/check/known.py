"""Which known bug a divergence may be: one of the ledger whose candidate fix makes the same case equal.

A rule is broken by many bugs, so its name alone says little. Only findings are looked up, each with a few runs more.
"""

import tempfile
from pathlib import Path

from msgspec.structs import replace

from eagletwin.cases.entry import Entry
from eagletwin.cases.reach import unreached
from eagletwin.cases.regressions import LEDGER
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import runs_no_change
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.lock import releases
from eagletwin.harness.families import RECIPES
from eagletwin.harness.judge.judge import judge

MOST = 4  # entries that are tried: each builds an engine


def may_be(host: Host, case: Case, rule: str, run: RunSpec) -> str:
    """The id of a live bug that breaks this rule, with whose remedy the case is equal; "" if none of those tried is it."""
    found = candidates(case, rule, run, host.source.called)
    return next((entry.id for entry in found[:MOST] if _cures(host, entry, case, run)), "")


def may_be_another(host: Host, entry: Entry, case: Case, rule: str, run: RunSpec) -> str:
    """The same, of a case that is equal with the entry's remedy: another bug, with whose remedy alone it is equal, too."""
    found = [other for other in candidates(case, rule, run, host.source.called) if other.remedy != entry.remedy]
    return next((other.id for other in found[:MOST] if _cures(host, other, case, run)), "")


def _cures(host: Host, entry: Entry, case: Case, run: RunSpec) -> bool:
    """Whether the case is equal with the entry's remedy."""
    assert entry.remedy is not None
    case = replace(case, exercises=())  # with the fix it may do something else
    try:
        engine = host.engine(case, (*run.patches, entry.remedy), run.kernels)
        with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
            trace = engine.run(case, Path(scratch), run.limits, fresh=True)
    except EagletwinError:  # the remedy does not fit this SGLang, or there is no engine for it
        return False
    verdict = judge(trace, run.without, run.view)
    return verdict.status == "equal" or runs_no_change(verdict, trace.differs)


def candidates(case: Case, rule: str, run: RunSpec, version: str) -> list[Entry]:
    """Bugs of this SGLang that break the rule, have a remedy that is not applied yet, and show in this mode: those whose own
    case is most like this one come first."""
    found = [
        entry
        for entry in LEDGER.values()
        if entry.rule == rule
        and entry.remedy is not None
        and entry.remedy not in run.patches
        and not unreached(entry, run.mode)
        and may_have(version, entry)
    ]
    return sorted(found, key=lambda entry: -sum(a == b for a, b in zip(_kind(entry.case), _kind(case), strict=True)))


def may_have(version: str, entry: Entry) -> bool:
    """Whether an SGLang of this version has the bug; of a fork, or a commit, it may have each that is live."""
    release = version.partition("+")[0]
    return entry.is_in(release) if release in releases() else not entry.fixed


def _kind(case: Case) -> tuple[object, ...]:
    samples = any(request.sampling is not None for request in case.requests)
    recipe = RECIPES[case.model]
    return recipe.mtp_layers > 0, recipe.reads_states, case.topk > 1, samples, case.engine.sglang.rejection_sampling
