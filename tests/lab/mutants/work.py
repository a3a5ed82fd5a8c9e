"""The whole measurement of the worker's mutants, which goes on where it was left: what is done is kept as lines of JSON."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import msgspec
from msgspec import Struct

from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import Source, init_file

from .corpus import Known, gather
from .draw import Mutant, mutants_of
from .hunt import COUNTED, Hunted, hunt

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
