"""`eagletwin acceptance --server`: rounds deserved and rounds used, request by request, and what the losses have in common."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from eagletwin.cases.entry import Doing
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, HarnessError, InputError
from eagletwin.harness.core.files import new_run_folder
from eagletwin.harness.core.recording import Inconclusive
from eagletwin.harness.core.terminal import count, progress
from eagletwin.harness.deserved.checkpoint import Prompt
from eagletwin.harness.deserved.conditions import Seen, diagnose, why_untold
from eagletwin.harness.deserved.follow import Shape
from eagletwin.harness.deserved.misconfiguration import explained_by
from eagletwin.harness.deserved.precision import Pair
from eagletwin.harness.deserved.rounds import Compared, Cuts, compare, possible_cuts
from eagletwin.harness.deserved.server import WAYS, Answer, Sent, Server, Started, Way, send
from eagletwin.harness.deserved.statistics import MOST_DEVIATIONS, Expected, chances, expected_rounds, power_of

from ..options import log_progress
from .losses import Losing, hidden_bugs, loss_remarks, suspects
from .report import AnswerRounds, ExpectedRounds, ServerAcceptance, WayRounds, conclude

# A server's answers, one after another: each is kept in the run folder as it comes, before anything is made of it.


@dataclass(frozen=True, slots=True)
class Prompting:
    """A server, what it says of itself, and what it is asked for: so many new tokens a prompt, so many prompts at once."""

    server: Server
    started: Started
    new_tokens: int
    at_once: int
    temperature: float

    @property
    def by_rejection(self) -> bool:
        """Whether drafts are accepted by chance."""
        return self.started.rejection_sampling and bool(self.temperature)


def collect_answers(asked: Prompting, prompts: Sequence[Prompt], folder: Path) -> Iterator[Sent]:
    """Put the prompts to the server in each way. Raises HarnessError where it does not answer."""
    total = len(WAYS) * len(prompts)
    with (folder / "answers.jsonl").open("ab", buffering=0) as file, progress("answers", total) as line:

        def save(sent: Sent) -> None:
            file.write(
                msgspec.json.encode({"prompt": sent.number, "way": sent.way, **msgspec.to_builtins(sent.answer)}) + b"\n"
            )

        ids = [prompt.ids for prompt in prompts]
        sending = send(
            asked.server,
            ids,
            asked.new_tokens,
            at_once=asked.at_once,
            temperature=asked.temperature,
            whole=asked.by_rejection,  # a server may have others of the checkpoint's for a default
            kept=save,
        )
        for number, sent in enumerate(sending, 1):
            if number % 10 == 0:
                log_progress(f"{number} of {total} answers")
            what = f"prompt {sent.number + 1} of {len(prompts)}, {WAYS[sent.way]}"
            line.look(what)  # while it is compared with what the pair deserves
            yield sent
            line.done(what)


# `acceptance --server --temperature` of a server that accepts by rejection sampling: its rounds, and their expectation.


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
            deserved[sent.way] = deserved.get(sent.way, Expected(0, 0)) + _expected_acceptance(pair, shape, sent, temperature)
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


def _expected_acceptance(pair: Pair, shape: Shape, sent: Sent, temperature: float) -> Expected:
    answer = sent.answer
    text, begin = (*answer.prompt, *answer.tokens), len(answer.prompt)
    if len(answer.tokens) < 2:  # the prefill emits the only token
        return Expected(0, 0)
    read = pair.read(text, temperature)
    kept = chances(pair.draft, text, read.hidden, read.said, shape.num_steps, temperature)
    return expected_rounds(kept, begin)


# Of the tokens of an answer to a greedy request, at most this share may be others than the target itself would say: engines
# compute in another order, and a text goes on with whatever token a near tie gave.
_OFF = 0.02
# And of the rounds, at most this share may be open, as of the choices of a verdict in 16 bits (judge/bounds.py).
_OPEN = 0.75


def against(pair: Pair, prompts: Sequence[Prompt], asked: Prompting, *, as_json: bool, out: Path) -> int:
    """Compare; print; return the exit code: 0 if each answer took the rounds that it deserves, 1 if one did not, 125 if nothing
    can be said."""
    started = asked.started
    shape = shape_of(started)
    pair.must_draft(shape)
    folder = new_run_folder(out, "acceptance")
    if asked.by_rejection:
        if started.engine != "sglang":
            raise InputError(
                "the server draws its drafts, or verifies them by blocks",
                consequence="how many rounds a text should take on the average is not worked out for it",
                remedy="leave --temperature out, or start it with the draft_sample_method greedy",
            )
        answers = collect_answers(asked, prompts, folder)
        return against_expectation(pair, shape, answers, started, asked.temperature, folder, as_json=as_json)
    layers = min(pair.draft.layers, shape.num_steps)  # that propose something
    everything, off, why = _ask(pair, prompts, asked, shape, layers, folder)
    untold = why_untold(everything, layers, started)
    seen = [one for one, cause in zip(everything, untold, strict=True) if cause is None]
    tokens = sum(len(one.sent.answer.tokens) for one in everything)
    strange = not asked.temperature and off > _OFF * max(tokens, 1)
    rounds = sum(one.compared.used for one in seen)
    diagnosis = diagnose(seen, started)
    status = EXIT_EQUAL
    if any(not one.compared.equal for one in seen):
        status = EXIT_DIVERGED
    open_ = sum(one.compared.open for one in seen)
    power = power_of(seen, started)
    if not why and rounds and not power.any_loss:
        why = (
            "No round of these answers must accept a draft, so a server that accepts none would look the same. Give prompts "
            "whose texts the draft foresees, or a larger --new-tokens."
        )
    if not why and open_ > _OPEN * rounds:
        why = "Near ties leave open what most of the rounds deserve, so their numbers say little of this server."
    if why or strange or not rounds:
        status = EXIT_UNKNOWN if status == EXIT_EQUAL or strange else status
    betrayed = [] if strange else explained_by(pair, shape, seen)
    server = _losing(pair, asked)
    found = suspects(diagnosis, server)
    hidden = {name: [str(one) for one in those] for name, those in hidden_bugs(power, server).items()}
    result = ServerAcceptance(
        server=started,
        exit_code=status,
        condition=diagnosis.condition,
        off_target=off,
        answers=[_answer(one, cause) for one, cause in zip(everything, untold, strict=True)],
        as_if=[mistake.name for mistake in betrayed],
        bugs=[str(one) for one in found],
        power=power,
        hidden_bugs=hidden,
        shares=dict(diagnosis.shares),
        remarks=[
            *_remarks(off if strange else 0, untold, why),
            *loss_remarks(seen, diagnosis, started, pair.draft, found, betrayed),
        ],
        strange=strange,
    )
    return conclude(result, folder, as_json=as_json)


def _losing(pair: Pair, asked: Prompting) -> Losing:
    """What decides which bugs the server can have."""
    started = asked.started
    does: dict[Doing, bool] = {
        "sampling": bool(asked.temperature),
        "weight updates": started.updated,
        "a host cache": started.host_cache,
    }
    return Losing(
        engine=started.engine,
        release=started.version,
        layers=pair.draft.layers > 0,
        tree=started.topk > 1,
        num_steps=started.num_steps,
        does=frozenset(name for name, is_done in does.items() if is_done),
    )


def shape_of(started: Started) -> Shape:
    """What the server drafts in a round. Raises InputError where it does not say, and for what is no EAGLE."""
    if started.algorithm.upper() not in ("EAGLE", "EAGLE3", "NEXTN") or not started.num_steps:
        raise InputError(
            f"the server drafts by {started.algorithm}, with {started.num_steps or 'no number of'} steps",
            consequence="the reference does not know what it drafts",
            remedy="ask a server that drafts by EAGLE or EAGLE3",
        )
    return Shape(started.num_steps, started.topk, started.num_draft_tokens)


def _ask(
    pair: Pair, prompts: Sequence[Prompt], asked: Prompting, shape: Shape, layers: int, folder: Path
) -> tuple[list[Seen], int, str]:
    """Answers beside what they deserve; tokens that the target would not say; and why it ended early, if it did."""
    known: dict[tuple[Answer, tuple[Cuts, ...]], tuple[int, Compared]] = {}
    seen: list[Seen] = []
    off, why = 0, ""
    try:
        for sent in collect_answers(asked, prompts, folder):
            # the same answer is told again and again, and compared once
            answer = msgspec.structs.replace(sent.answer, cached=0)
            ways = possible_cuts(sent.way, len(answer.prompt), asked.started.chunk, layers)
            if (answer, ways) not in known:
                text = (*answer.prompt, *answer.tokens)
                read = pair.read(text)
                own = pair.on(text, read, shape)
                known[answer, ways] = own.off_target(read, len(answer.prompt)), compare(own, shape, answer, read, ways)
            others, compared = known[answer, ways]
            off += others
            seen.append(Seen(sent, compared, ways))
    except HarnessError as error:
        if not seen:
            raise
        why = str(error)
    return seen, off, why


def _remarks(off: int, untold: Sequence[Inconclusive | None], why: str) -> list[str]:
    """What a reader must know beside the rounds."""
    remarks = []
    if off:
        remarks.append(
            f"The answers hold {off} tokens that this target does not say greedily: the server has other weights or another "
            "dtype than --target, or wrong output. What its drafts deserve cannot be told."
        )
    for cause, number in Counter(one for one in untold if one is not None).items():
        remarks.append(
            f"Of {count(number, 'more answer')} it cannot be told what the rounds deserve: {cause.why}. To have them compared, "
            f"{cause.remedy}."
        )
    return [*remarks, why] if why else remarks


def _answer(one: Seen, cause: Inconclusive | None) -> AnswerRounds:
    return AnswerRounds(
        prompt=one.sent.number,
        way=one.sent.way,
        tokens=len(one.sent.answer.tokens),
        cached=one.sent.answer.cached,
        deserved=(one.compared.deserved.fewest, one.compared.deserved.most),
        used=one.compared.used,
        wrong=one.compared.wrong,
        untold=cause is not None,
        untold_cause="" if cause is None else cause.cause,
    )
