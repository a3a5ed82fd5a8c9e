"""A driver of a campaign whose workers sleep in place of running cases: `python -m tests.harness.campaign_driver ADDRESS FOLDER
WORKERS CASES SECONDS`. It begins a campaign in FOLDER, or goes on with the one that is there. Each run of a case is a
line of FOLDER/ran, whoever runs it, so that what ran twice can be counted."""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from eagletwin import __version__
from eagletwin.harness.commands.campaign.command import conduct
from eagletwin.harness.commands.campaign.messages import Up, packed, read_job, read_terms
from eagletwin.harness.commands.campaign.on_ray import OnRay

from .campaigns import answers, terms


class Sleeper:
    """A worker for which a case is a sleep: all that remains are the campaign's own costs."""

    def __init__(self, said: bytes) -> None:
        options = read_terms(said).options
        self._log, self._seconds = options.out / "ran", options.shrink_minutes

    def up(self) -> bytes:
        return packed(Up(__version__, "here", os.getpid()))

    def close(self) -> None:
        pass

    def run(self, job: bytes) -> Iterator[bytes]:
        wanted = read_job(job)
        counted: Counter[str] = Counter()
        for answer in answers(wanted, counted):
            with self._log.open("a") as log:
                log.write(f"{next(iter(counted))}\n")
            counted.clear()
            time.sleep(self._seconds)
            yield packed(answer)


def main() -> int:
    address, folder, workers, cases, seconds = sys.argv[1:6]
    own = terms(int(cases), out=Path(folder), shrink_minutes=float(seconds))
    with OnRay(packed(own), address, int(workers), 0.0, kind=Sleeper) as crew:
        return conduct(own, Path(folder), crew)


if __name__ == "__main__":
    sys.exit(main())
