"""`eagletwin.check`: run a case on SGLang's real worker and judge it, in one call."""

import atexit
from collections.abc import Sequence
from functools import cache

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import CPU, Mode, RunSpec
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import resolve

from .trials import Trials


def check(case: Case, *, sglang: str = "", patches: Sequence[Patch] = (), mode: Mode = CPU) -> Verdict:
    """Run a case and judge it. A second case of the same SGLang and mode starts in well under a second.

    sglang   a release, or the folder of a source tree; empty: the one that is installed
    patches  changes of that SGLang, in memory

    Raises EagletwinError where no engine starts, a patch does not apply, or the case is not valid.
    """
    trials = Trials(_host(sglang, mode), RunSpec(mode=mode, patches=tuple(patches)))
    return trials.look(case).verdict


@cache
def _host(sglang: str, mode: Mode) -> Host:
    """One process that has imported this SGLang. It ends with this one."""
    host = Host(source=resolve(sglang), mode=mode)
    atexit.register(host.close)
    return host
