"""Try many cases quickly: reused forks, each verdict remembered, and nothing kept but what is asked for.

What fuzz and the pytest plugin search with. A trial is a first look: whatever it finds is confirmed by check.confirm.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from .case import Case, encode_case
from .check import play
from .engines.process import Host, Limits
from .engines.wire import Kernels
from .judge import DECLARED_VIEW, Verdict, View, judge
from .patch import Patch
from .trace import Header


@dataclass(frozen=True, slots=True)
class Trial:
    """What one look at a case came to.

    before  the cases that had run in the same process
    until   the scheduler iteration after which it was to stop; -1: it ran to its end
    """

    case: Case
    verdict: Verdict
    header: Header
    before: tuple[Case, ...]
    until: int = -1

    @property
    def kind(self) -> str:
        """What was found, the same for two cases that show the same thing: "" if nothing."""
        stopped = self.header.ending.kind == "stopped" and self.verdict.status == "unknown"
        if self.verdict.status == "equal" or self.verdict.vacuous or stopped:
            return ""
        return self.verdict.rule or "unknown"


class Trials:
    """Runs and judges cases on the engines of a host, all with the same patches and kernels, in the same view."""

    def __init__(
        self,
        host: Host,
        *,
        patches: tuple[Patch, ...] = (),
        kernels: Kernels = "fast",
        without: frozenset[str] = frozenset(),
        view: View = DECLARED_VIEW,
        limits: Limits = Limits(),  # noqa: B008  frozen
    ) -> None:
        self.host = host
        self.patches = patches
        self.kernels = kernels
        self.without = without
        self.view = view
        self.limits = limits
        self.ran = 0  # cases that an engine ran
        self._known: dict[bytes, Trial] = {}

    def known(self, case: Case, until: int = -1) -> Trial | None:
        """What an earlier look at this case, by whatever name and as far as that, came to."""
        trial = self._known.get(_canonical(case))
        seen = trial is not None and (bool(trial.kind) or trial.until == -1 or 0 <= until <= trial.until)
        return trial if seen else None

    def forget(self, case: Case) -> None:
        """What was seen of this case does not stand."""
        self._known.pop(_canonical(case), None)

    def look(self, case: Case, until: int = -1, *, anew: bool = False) -> Trial:
        """Run and judge a case, unless that is known already and not wanted `anew`. until: no further than this iteration."""
        trial = None if anew else self.known(case, until)
        if trial is None:
            trial = self._run(case, until)
            self._known[_canonical(case)] = trial
        return trial

    def _run(self, case: Case, until: int) -> Trial:
        engine = self.host.engine(case, self.patches, self.kernels)
        with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
            trace = engine.run(case, Path(scratch), self.limits, fresh=False, until=until)
        self.ran += 1
        return Trial(case, judge(trace, self.without, self.view), trace.header, engine.before, until)

    def look_alone(self, case: Case) -> Verdict:
        """Run and judge a case in a process of its own."""
        engine = self.host.engine(case, self.patches, self.kernels)
        with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
            return judge(play(engine, (), case, Path(scratch), self.limits), self.without, self.view)


def _canonical(case: Case) -> bytes:
    return encode_case(replace(case, name="case"))
