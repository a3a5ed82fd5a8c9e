"""A process that runs blocks of a search: `python -m eagletwin.harness.commands.fuzz.worker [FD]` (pool.py).

FD: where it joins the process that has imported SGLang; without, it has one of its own.
It is told once what is searched, then one block after the other, and answers a line of JSON for each case.
"""

import gc
import os
import signal
import sys
from typing import BinaryIO

import msgspec

from eagletwin.cases.sample_cases import draw_from_seeds_alone
from eagletwin.harness.check.known import Mends
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.start import Zygote

from .looking import Looking
from .messages import Answer, BlockFailed, BlockOver, Wanted, read_options, written


def main() -> None:
    """Serve until there is nothing more on stdin."""
    for number in (signal.SIGINT, signal.SIGHUP):  # they are for the process that asks: it hangs up
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed
    options = read_options(sys.stdin.buffer.readline())
    draw_from_seeds_alone()
    try:
        source, mode = options.source, options.run.mode
        joined = Zygote.joined(int(sys.argv[1]), source, mode) if sys.argv[1:] else None
        with Host(joined, source, mode) as host:
            looking = Looking(Mends(host, options.run, options.unknown), options.plan)
            gc.freeze()  # as in the process that asks
            for line in sys.stdin.buffer:
                _serve(looking, msgspec.json.decode(line, type=Wanted), answers)
    except BrokenPipeError:  # nobody waits for an answer any more
        os._exit(0)


def _serve(looking: Looking, wanted: Wanted, answers: BinaryIO) -> None:
    def say(answer: Answer) -> None:
        answers.write(written(answer))
        answers.flush()

    try:
        for seen in looking.block(wanted.block, wanted.earlier):
            say(seen)
        say(BlockOver())
    except EagletwinError as error:
        say(BlockFailed(error.cause, error.consequence, error.remedy))


if __name__ == "__main__":
    main()
