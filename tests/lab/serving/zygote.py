"""Starts the process from which servers are forked. Imports nothing slow itself, as engines/start.py."""

import contextlib
import subprocess
import sys
from pathlib import Path

from eagletwin.harness.engines.start import Zygote

# What ends a server does it by force, so this is never reached but on a machine that stands still.
_END_SECONDS = 30.0
_ROOT, _FRONT = str(Path(__file__).parents[3]), f"{__package__}.front"


class FrontEnd(Zygote):
    """A zygote with SGLang's HTTP front end (serving/front.py): servers are forked from it, and no engines."""

    @property
    def program(self) -> list[str]:
        return [
            sys.executable,
            "-c",
            f"import sys; sys.path = [{_ROOT!r}, *filter(None, sys.path)]; from {_FRONT} import main; main()",
        ]

    def close(self) -> None:
        self._theirs.close()
        self.connection.close()
        if self.ready and self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it ends when all that its servers were has been collected
                self._process.wait(_END_SECONDS)
        super().close()
