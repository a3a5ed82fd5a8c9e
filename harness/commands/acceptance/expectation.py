"""`acceptance --server --temperature` of a server that accepts by rejection sampling: its rounds, and their expectation."""

from collections.abc import Iterable
from pathlib import Path

from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, HarnessError, InputError
from eagletwin.harness.deserved.follow import Shape
from eagletwin.harness.deserved.pair import Pair
from eagletwin.harness.deserved.server import Sent, Started, Way
from eagletwin.harness.deserved.statistics import MOST_DEVIATIONS, Expected, chances, expected

from .report import ExpectedRounds, WayRounds, conclude


def against_expectation(
    pair: Pair, shape: Shape, answers: Iterable[Sent], started: Started, temperature: float, folder: Path, *, as_json: bool
) -> int:
    """Compare all answers, and those of each way; print; return the exit code: 0 if the rounds are within chance, 1 if not."""
    if shape.topk > 1 or pair.draft.layers > 1:
        raise InputError(
            "the server accepts by rejection sampling, of a tree or of a draft of several layers",
            consequence="what its layers are fed depends on drafts that were refused and that nobody tells",
            remedy="leave --temperature out",
        )
    used, deserved = dict[Way, int](), dict[Way, Expected]()
    number, why, tokens = 0, "", 0
    try:
        for sent in answers:
            number += 1
            tokens += len(sent.answer.tokens) - 1  # each a round of its own, if no draft is accepted
            used[sent.way] = used.get(sent.way, 0) + sent.answer.rounds
            deserved[sent.way] = deserved.get(sent.way, Expected(0, 0)) + _expected(pair, shape, sent, temperature)
    except HarnessError as error:
        if not used:
            raise
        why = str(error)
    parts = [(way, used[way], deserved[way]) for way in used]
    total, whole = sum(used.values()), sum(deserved.values(), Expected(0, 0))
    wrong = [part for part in [("all", total, whole), *parts] if abs(part[2].deviations(part[1])) > MOST_DEVIATIONS]
    if not why and whole.deviations(tokens) <= MOST_DEVIATIONS:
        why = "A server that accepts no draft of these texts would be within chance as well. Give more prompts, or longer ones."
    status = EXIT_DIVERGED if wrong else EXIT_UNKNOWN if why else EXIT_EQUAL
    found = ExpectedRounds(
        server=started,
        exit_code=status,
        temperature=temperature,
        answers=number,
        used=total,
        expected=whole.rounds,
        deviation=whole.variance**0.5,
        deviations=whole.deviations(total),
        smallest_loss=whole.smallest_loss,
        ways=[WayRounds(way=way, expected=of.rounds, used=own, deviations=of.deviations(own)) for way, own, of in parts],
        doubt=why,
    )
    return conclude(found, folder, as_json=as_json)


def _expected(pair: Pair, shape: Shape, sent: Sent, temperature: float) -> Expected:
    answer = sent.answer
    text, begin = (*answer.prompt, *answer.tokens), len(answer.prompt)
    if len(answer.tokens) < 2:  # the prefill emits the only token
        return Expected(0, 0)
    read = pair.read(text, temperature)
    kept = chances(pair.draft, text, read.hidden, read.said, shape.num_steps, temperature)
    return expected(kept, begin)
