"""Requests that ask for what cannot be: their grammar, processor, bias and min_new_tokens together allow no token somewhere.

No token is right there, and what comes behind it follows from whichever an engine gave. SGLang's grammar may refuse that one,
and the request is aborted; or take it, and the request goes on. So nothing of such a request is judged from that token on, and
the verdict says so. What comes before is judged as of any request, and so is what the scheduler and other requests do.
"""

from typing import NamedTuple

from eagletwin.harness.core.trace import Trace

from .story import Story


class Impossible(NamedTuple):
    """number: of the prefill or verify record that gave a token where none is allowed; token: which output token that is."""

    number: int
    token: int


def impossible(trace: Trace, stories: dict[str, Story]) -> dict[str, Impossible]:
    """By request; of those that ask for nothing impossible there is nothing."""
    found = dict[str, Impossible]()
    for number, record in enumerate(trace.header.records):
        story = stories.get(record.request)
        if story is None or story.impossible is None or record.request in found:
            continue
        if record.stage == "prefill" and record.numbers["final"]:
            end = record.numbers["end"]
        elif record.stage == "verify":
            end = story.rounds[record.round].end
        else:
            continue
        if end > story.impossible:
            found[record.request] = Impossible(number, story.impossible + 1 - len(story.prompt))
    return found
