"""The worker's mutants: the search for one, and the whole measurement, which goes on where it was left."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from eagletwin.harness.check.trials import Trial, Trials
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.run_spec import Limits
from eagletwin.harness.engines.host import Host, PatchDoesNotApply, WouldNotStart
from eagletwin.harness.engines.source import Source, init_file

from .corpus import Known, gather
from .draw import Mutant, mutants_of

# Searching for one mutant: the cases of a default search that run its place, until one is not equal.

LIMITS = Limits(step=20.0, case=60.0)
KILLED = ("rule", "crash", "unknown", "refused")
COUNTED = (*KILLED, "survived")


class Hunted(Struct, frozen=True, kw_only=True):
    """What came of one mutant.

    outcome  `rule`; `crash` (or a hang); `unknown`: a trace that cannot be judged; `refused`: no engine could be built;
             `survived`; `not run`: no case ran the place; `unfit`: the edit does not apply; `harness`: eagletwin failed
    by       the rule, or the exception
    cases    that ran the place, until it was killed; of: how many there were to run; undecided: those left so
    case     the number in the corpus of the case that killed it; -1: none. told: the option of the search that draws it
    """

    mutant: Mutant
    outcome: str
    by: str = ""
    cases: int = 0
    of: int = 0
    undecided: int = 0
    case: int = -1
    told: str = ""
    seconds: float = 0.0


def hunt(host: Host, mutant: Mutant, corpus: Sequence[Known], most: int, seconds: float) -> Hunted:
    """Up to `most` cases that run the place, for up to so many seconds."""
    begun = time.monotonic()
    order = list(in_turn(mutant, corpus))
    found = Hunted(mutant=mutant, outcome="not run", of=len(order))
    unfit = 0
    for number in order:
        if found.cases >= most or time.monotonic() > begun + seconds:
            break
        known = corpus[number]
        run = replace(known.run, patches=(*known.run.patches, mutant.patch), limits=LIMITS)
        trials = Trials(host, run)
        try:
            trial = trials.look(known.case)
            if trial.signature is not None and not trial.verdict.undecided:
                trial = trials.look_alone(known.case)
        except PatchDoesNotApply:
            unfit += 1
            if unfit >= 3 and not found.cases:  # a remedy has the same text, as a rule
                found = replace(found, outcome="unfit")
                break
            continue
        except WouldNotStart as error:
            found = replace(found, outcome="refused", by=" ".join(error.cause.split())[:200], case=number)
            break
        except EagletwinError as error:
            found = replace(found, outcome="harness", by=" ".join(str(error).split())[:300], case=number)
            break
        if trial.verdict.vacuous or _passed_by(trial, mutant):
            continue
        found = replace(found, cases=found.cases + 1, outcome="survived")
        if trial.verdict.undecided:
            found = replace(found, undecided=found.undecided + 1)
        elif trial.signature is not None:
            outcome, by = _killed(trial)
            found = replace(found, outcome=outcome, by=by, case=number)
            break
    told = corpus[found.case].told if found.case >= 0 else ""
    return replace(found, told=told, seconds=round(time.monotonic() - begun, 2))


def _passed_by(trial: Trial, mutant: Mutant) -> bool:
    """Whether the function was called and the mutated statement did not run."""
    unreached = trial.header.unreached_edits or ()
    return trial.verdict.status == "equal" and f"{mutant.target}: {mutant.match.strip()!r}" in unreached


def _killed(trial: Trial) -> tuple[str, str]:
    signature = trial.signature
    assert signature is not None
    if trial.verdict.status == "diverged":
        return "rule", signature.rule
    return "crash" if signature.rule else "unknown", str(signature)


def in_turn(mutant: Mutant, corpus: Sequence[Known]) -> Iterator[int]:
    """The cases that run the mutant's place: first that with most that no case before it had, and again."""
    left = {number: known.traits for number, known in enumerate(corpus) if known.runs(mutant.file, mutant.block)}
    had: set[str] = set()
    while left:
        best = max(left, key=lambda number: len(left[number] - had))
        if had and not left[best] - had:
            had.clear()
            continue
        had |= left.pop(best)
        yield best


# The whole measurement of the worker's mutants, which goes on where it was left: what is done is kept as lines of JSON.

EACH = 3  # cases of a block
# Of the scheduler's batch: what a worker's result comes into. The rest of that file is no part of speculation.
BATCH = "sglang/srt/managers/schedule_batch.py"
OF_BATCH = {
    "filter_batch",
    "merge_batch",
    "prepare_for_decode",
    "retract_decode",
    "reset_for_retract",
    "update_finish_state",
    "_check_token_based_finish",
    "_check_vocab_boundary_finish",
    "_cap_finished_len_at_max_new_tokens",
    "_new_tokens_required_next_decode_spec_v2",
    "update_spec_correct_drafts_histogram",
    "owned_kv_len",
    "spec_prepare_for_decode",
    "_compute_chunked_req_next_prompt_token",
    "get_evicted_seqlen",
}


class DrawnCases(Struct, frozen=True, kw_only=True):
    """Which cases are run with the mutants: of so many blocks of a default search, and of one for each thing to ask for."""

    seed: int
    blocks: int
    asking: int

    def named(self, sglang: str) -> str:
        """The file that has them."""
        return f"{sglang}-{self.seed}-{self.blocks}-{self.asking}.jsonl"


def corpus_in(path: Path) -> list[Known]:
    return [msgspec.json.decode(line, type=Known) for line in path.read_bytes().splitlines()]


def outcomes_in(path: Path) -> list[Hunted]:
    """Of each mutant what came of it last."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return list({one.mutant: one for one in (msgspec.json.decode(line, type=Hunted) for line in lines)}.values())


def make_corpus(path: Path, source: Source, drawn: DrawnCases, say: Callable[[str], None]) -> None:
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        for number, known in enumerate(gather(source, drawn.seed, drawn.blocks, drawn.asking, EACH)):
            file.write(msgspec.json.encode(known) + b"\n")
            say(f"{number + 1} cases, {known.told or 'a default search'}, block {known.block}")
    part.rename(path)


def reached_mutants(source: Source, corpus: Sequence[Known]) -> list[Mutant]:
    """All mutants of places that a case of a default search runs."""
    init = init_file(source)
    assert init is not None
    root = init.parent.parent
    ran: dict[str, set[int]] = defaultdict(set)
    for known in corpus:
        for file, lines in known.ran.items() if not known.told else ():
            ran[file].update(lines)
    return [
        mutant
        for file in sorted(ran)
        for mutant in mutants_of((root / file).read_text(encoding="utf-8"), file.removesuffix(".py").replace("/", "."), file)
        if mutant.block in ran[file] and (file != BATCH or mutant.function in OF_BATCH)
    ]


def hunt_all(
    corpus_at: Path, outcomes: Path, source: Source, asked: tuple[int, int, int, float], say: Callable[[str], None]
) -> None:
    """Search for so many mutants, drawn with a seed, each in at most so many cases and seconds. What cannot be planted, or
    is not run after all, is replaced by the next one drawn."""
    number, seed, most, seconds = asked
    corpus = corpus_in(corpus_at)
    done = {one.mutant: one for one in outcomes_in(outcomes)}
    found = reached_mutants(source, corpus)
    say(f"{len(found)} mutants of places that {len(corpus)} cases run")
    outcomes.parent.mkdir(parents=True, exist_ok=True)
    counted = 0
    with Host(source=source) as host, outcomes.open("ab") as file:
        for mutant in Random(seed).sample(found, len(found)):
            if counted >= number:
                break
            came = done.get(mutant)
            if came is None:
                came = hunt(host, mutant, corpus, most, seconds)
                file.write(msgspec.json.encode(came) + b"\n")
                file.flush()
                say(f"{counted + 1}: {came.outcome} {came.by}, {mutant.name}")
            counted += came.outcome in COUNTED
