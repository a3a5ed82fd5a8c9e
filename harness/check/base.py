"""The SGLang beside which a change is looked at: what a case shows there as well is not the change's.

A remedy may mend more than its own bug: one that widens a buffer also hides that a change made the buffer too small. So what is
wrong with a change and equal with a remedy is a known bug's only if it is wrong without the change, too.
"""

from collections.abc import Collection

from msgspec.structs import replace

from eagletwin.cases.regressions import LEDGER
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.verdict import View
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import Source, here, resolve

from .trials import Trials


class Base:
    """`run` on the SGLang without the change: a release, as `host` has it. called: what messages call it."""

    def __init__(self, host: Host, run: RunSpec) -> None:
        self._host, self.run = host, run
        self.called = f"SGLang {host.source.called}"

    def right(self, case: Case, remedies: Collection[Patch], view: View) -> bool:
        """Whether all of a case is right there, with these remedies. False where it cannot be asked."""
        patches = tuple(dict.fromkeys((*self.run.patches, *remedies)))
        try:
            trial = Trials(self._host, replace(self.run, patches=patches, view=view)).look_alone(replace(case, exercises=()))
        except EagletwinError:
            return False
        return trial.clean


def base_of(host: Host, run: RunSpec) -> Base | None:
    """What a run is to be compared with: of a tree its release, or the one that is installed; of an SGLang that patches change,
    the same without them, but for remedies of the ledger, which the search is to look past. None: nothing is changed in it, or
    the release is not at hand."""
    remedies = tuple(patch for patch in run.patches if any(patch == entry.remedy for entry in LEDGER.values()))
    release = _release_of(host.source) if host.source.tree else None
    if host.source.tree and release is None:
        return None
    if not host.source.tree and remedies == run.patches:
        return None
    beside = host if release is None else host.beside(release)
    return Base(beside, replace(run, sglang=beside.source.name, patches=remedies, changes=()))


def _release_of(tree: Source) -> Source | None:
    """The release that a tree was made from, or the one that is installed; None if the tree is that, or neither is at hand."""
    version, at_hand = tree.called.partition("+")[0], here()
    if tree.called in at_hand:
        return None
    release = resolve(version if version in at_hand else "")
    return None if release.tree else release
