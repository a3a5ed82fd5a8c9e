"""The SGLang beside which a change is looked at: what a case shows there as well is not the change's.

A remedy may mend more than its own bug: one that widens a buffer also hides that a change made the buffer too small. So what is
wrong with a change and equal with a remedy is a known bug's only if it is wrong without the change, too.
"""

from collections.abc import Collection

from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.environment import installed
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.verdict import View
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.engines.source import Source, at_hand

from .trials import Trials


class Base:
    """`run` on the SGLang without the change: a release, as `host` has it. called: what messages call it."""

    def __init__(self, host: Host, run: RunSpec) -> None:
        self._host, self.run = host, run
        self.called = f"SGLang {host.source.called}"
        self.refused = ""  # why it could not be asked, the last time

    def right(self, case: Case, remedies: Collection[Patch], view: View) -> bool:
        """Whether all of a case is right there, with these remedies. False where it cannot be asked: `refused` says why."""
        try:
            trial = self.trials(remedies, view).look_alone(replace(case, exercises=()))
        except EagletwinError as error:
            self.refused = " ".join(error.cause.split())
            return False
        self.refused = ""
        return trial.clean

    def numbers(self, case: Case, remedies: Collection[Patch], view: View) -> str:
        """A digest of all that a case records there (Trial.numbers). "" where it cannot be asked."""
        try:
            return self.trials(remedies, view).look_alone(case).numbers
        except EagletwinError:
            return ""

    def trials(self, remedies: Collection[Patch], view: View) -> Trials:
        """Runs cases there, with these remedies."""
        patches = tuple(dict.fromkeys((*self.run.patches, *remedies)))
        return Trials(self._host, replace(self.run, patches=patches, view=view))


def base_of(host: Host, run: RunSpec) -> Base | None:
    """What a run is to be compared with: the base that its SGLang names; else of a tree its release, or the one that is
    installed; of an SGLang that patches change, the same without them, but for remedies of the ledger, which the search is to
    look past. None: nothing is changed in it, or no release is at hand."""
    remedies = tuple(patch for patch in run.patches if any(patch == entry.remedy for entry in LEDGER.values()))
    if not (host.source.tree or host.source.base):
        return None if remedies == run.patches else Base(host, replace(run, patches=remedies, changes=()))
    try:
        release = host.source.base or _release_of(host.source)
    except EagletwinError:  # a release of the cache that is damaged, where there is no network
        release = None
    return (
        None if release is None else Base(host.beside(release), replace(run, sglang=release.name, patches=remedies, changes=()))
    )


def _release_of(tree: Source) -> Source | None:
    """The release that a tree was made from, or the installed one's; None if the tree is that, or it is not at hand."""
    version = tree.called.partition("+")[0]
    if tree.called == version and version in releases():
        return None
    return at_hand(version if version in releases() else installed("sglang"))
