"""What a server recorded, beside its checkpoints: did the head draft what was drafted, and does it store what was stored.

Of a chain, each draft is asked up to the first that was refused: behind that one nothing is in the text. Of a tree and of
several layers, how many drafts each round accepted. Rows of the draft's pool are compared where `record --rows` kept them: they
follow from the token, from the target's state, and so from all that the target has stored.
"""

from dataclasses import replace

import numpy as np
import torch

from eagletwin.harness.core.recording import Inconclusive, RecordedServer, RecordingComparison
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW, Divergence
from eagletwin.harness.judge.bounds import FLOAT32
from eagletwin.harness.judge.compare import divergence_of
from eagletwin.harness.judge.replay import RequestReplay, Round, replay_requests

from .follow import Shape, chain_logits
from .precision import Pair, off_by, stored_rows
from .rounds import Cuts, compare
from .server import Answer, Started
from .target import Read

# A float32 server on a GPU rounds the factors of Triton's products to TF32 by default, 11 significant bits: each of the two is
# off by 2**-11 of itself at most. Rows were seen 1.2e-4 to 5e-4 off (docs/guide/gpu.md); two logits may each be off so.
_TF32 = 2.0**-10
_STAGES = ("prefill", "draft", "verify", "extend")  # of a round, in the order of the data


# Why no draft of a recording is compared.
_BY_CHANCE = Inconclusive(
    "drawn by chance",
    "rejection sampling drew the drafts, by coins that are not recorded",
    "record greedy requests, or serve without --speculative-use-rejection-sampling",
)
_SIXTEEN_BITS = Inconclusive(
    "16 bits",
    "the server computes in 16 bits, where rounding decides which refused drafts several layers are fed",
    "serve the pair in float32 (--dtype float32)",
)
_BORROWED = Inconclusive(
    "rows of another request",
    "rows of the prompt are another request's, and the last layers keep there what that one went on with",
    "record requests whose prompts begin otherwise, or serve with --disable-radix-cache",
)
_ROUND_LOST = Inconclusive(
    "a round lost",
    "it was retracted or lost a round, so that its text does not say where rounds of a tree or of several layers begin",
    "give the server more memory for rows, or let it run fewer requests at once (--max-running-requests)",
)
_TREES_OF_LAYERS = Inconclusive(
    "trees of several layers",
    "what trees deserve whose levels are proposed by layers of their own is not worked out",
    "serve with --speculative-eagle-topk 1",
)
_NO_ROUND = Inconclusive(
    "no round",
    "no round committed a token, so that no draft was accepted or refused",
    "record requests of more tokens (max_new_tokens)",
)


def started_of(said: RecordedServer) -> Started:
    """A rank's own account of its server, as `Started` has what a server says over HTTP."""
    asked = said.arguments

    def of(name: str) -> str:
        value = asked.get(name, "")
        return "" if value == "None" else value

    return Started(
        version=said.engine.version,
        algorithm=of("speculative_algorithm"),
        num_steps=int(of("speculative_num_steps") or 0),
        topk=int(of("speculative_eagle_topk") or 1),
        num_draft_tokens=int(of("speculative_num_draft_tokens") or 0),
        chunk=int(of("chunked_prefill_size") or 0),
        page_size=int(of("page_size") or 1),
        dtype=said.engine.mode.partition(",")[0],
        target=of("model_path"),
        draft=of("speculative_draft_model_path"),
        overlap=said.engine.overlap,
        graphs=said.engine.mode.endswith(", graphs"),
        quantization=of("quantization"),
        kv_dtype=of("kv_cache_dtype") or "auto",
    )


def compare_recording(pair: Pair, trace: Trace, said: RecordedServer, *, altered: bool) -> RecordingComparison:
    """Compare one recording of this rank. Raises InputError for tokens that this target does not have.

    altered: the request's logits were changed before a token was chosen, so the target alone does not say which one it is
    """
    header = trace.header
    request, found = header.case.requests[0], RecordingComparison()
    replay = replay_requests(trace, DECLARED_VIEW)[request.id]
    if len(replay.tokens) < 2:
        found.untold = _NO_ROUND
        return found
    case = header.case
    shape = Shape(case.num_steps, case.topk, case.verify_nodes)
    if pair.precision is None and header.engine.device == "cuda":
        pair = replace(pair, tie=2 * _TF32)
    read = pair.read(replay.tokens)
    own = pair.on(replay.tokens, read, shape)
    if request.sampling is None and not altered:
        _check_committed(own, replay, read, found)
    found.untold = _why_untold(own, trace, said, replay, shape)
    if found.untold is None:
        own.must_draft(shape)
        if _are_chains(own, shape):
            _chains(own, replay, read, shape, found)
        else:
            _rounds(own, replay, read, shape, _cuts(trace), found)
    _rows(own, trace, replay, read, found)
    found.divergences.sort(key=lambda one: (one.round, _STAGES.index(one.stage)))
    return found


def _why_untold(pair: Pair, trace: Trace, said: RecordedServer, replay: RequestReplay, shape: Shape) -> Inconclusive | None:
    """Why nobody can tell what its rounds deserve; None: it can be told."""
    whole, samples = _whole(replay), trace.header.case.requests[0].sampling is not None
    if not whole:
        return _NO_ROUND
    if samples and said.arguments.get("speculative_use_rejection_sampling", "True") != "False":
        return _BY_CHANCE
    if _are_chains(pair, shape):
        return None
    if pair.draft.layers and shape.topk > 1:
        return _TREES_OF_LAYERS
    if min(pair.draft.layers, shape.num_steps) > 1:
        if pair.precision is not None:
            return _SIXTEEN_BITS  # see Pair.must_draft
        if _has_borrowed_rows(trace):
            return _BORROWED
    # A retracted request is prefilled again, which gives a token; nothing goes on behind the last one.
    ends = [*(following.committed for following in whole[1:]), len(replay.tokens) - 1]
    lost = any(one.end != end for one, end in zip(whole, ends, strict=True))
    return _ROUND_LOST if lost else None


def _are_chains(pair: Pair, shape: Shape) -> bool:
    """Whether one head drafts by what it makes of its own drafts: each draft follows from the text up to it."""
    return shape.topk == 1 and not pair.draft.layers


def _whole(replay: RequestReplay) -> list[Round]:
    """The rounds that committed something."""
    return [one for one in replay.rounds if one.end > one.committed]


def _has_borrowed_rows(trace: Trace) -> bool:
    """Whether rows of the prompt are another request's. Of several layers the last ones keep what that one went on with, of
    which this one's text says nothing.

    They are where it began behind a cached prefix; and where it gave its own up for those that others had put into the cache
    meanwhile, so that its table shows other slots than those that it wrote.
    """
    written: list[int] = []
    for number, record in enumerate(trace.header.records):
        if "table" not in record.tensors:
            continue
        table = trace.integers(number, "table")
        start = record.numbers["start"] if record.stage == "prefill" else len(written)
        if table[: min(start, len(written))] != written[:start] or start > len(written):
            return True
        if record.stage == "prefill":
            written[start:] = table[start : record.numbers["end"]]
    return False


def _cuts(trace: Trace) -> Cuts:
    """Where chunks of the prompt ended in front of its end."""
    prefills = [record.numbers for record in trace.header.records if record.stage == "prefill"]
    return tuple(numbers["end"] for numbers in prefills if not numbers["final"])


def _check_committed(pair: Pair, replay: RequestReplay, read: Read, found: RecordingComparison) -> None:
    """A greedy request commits what the target says."""
    begin, lead = len(replay.prompt), read.lead.tolist()
    for place in range(begin, len(replay.tokens)):
        found.checked["verify.accept"] += 1
        if lead[place - 1] <= pair.tie:
            continue
        number = next((n for n, one in enumerate(replay.rounds) if place <= one.end), 0)
        expected, actual = int(read.best[place - 1]), replay.tokens[place]
        index = f"token {place} of the text"
        found.divergences.append(_wrong("verify.accept", replay, number, index, expected, actual))


def _chains(pair: Pair, replay: RequestReplay, read: Read, shape: Shape, found: RecordingComparison) -> None:
    """Each draft of a round, up to the first that was refused."""
    by_start = {one.committed: number for number, one in enumerate(replay.rounds)}
    ids, kind = torch.tensor(replay.tokens, device=read.hidden.device), pair.draft.heads[0].embedding.dtype
    for first, logits in chain_logits(pair.draft, ids, read.hidden.to(kind), shape.num_steps):
        for start in range(first, first + len(logits)):
            number = by_start.get(start)
            if number is not None:
                _chain(pair, replay, number, logits[start - first], found)


def _chain(pair: Pair, replay: RequestReplay, number: int, logits: torch.Tensor, found: RecordingComparison) -> None:
    """logits [S, V]"""
    round = replay.rounds[number]
    for step, drafted in enumerate(round.drafted[: round.end - round.committed]):
        row = logits[step]
        best = int(row.argmax())
        found.checked["draft.proposal"] += 1
        inside = 0 <= drafted < len(row)
        size = torch.where(row.isinf(), 0, row).abs().max()
        if inside and float(row[best] - row[drafted]) <= pair.tie * float(size):
            found.open += best != drafted
            continue
        index = f"draft {step + 1} behind {round.committed + 1} tokens"
        found.divergences.append(_wrong("draft.proposal", replay, number, index, best, drafted, step))
        return


def _rounds(pair: Pair, replay: RequestReplay, read: Read, shape: Shape, cuts: Cuts, found: RecordingComparison) -> None:
    """How many drafts each round accepted."""
    begin, whole = len(replay.prompt), _whole(replay)
    answer = Answer(
        prompt=replay.prompt,
        tokens=tuple(replay.tokens[begin:]),
        rounds=len(whole),
        starts=tuple(one.committed for one in whole),
        accepted=None,
        cached=0,
        finish="",
    )
    compared = compare(pair, shape, answer, read, (cuts,))
    found.checked["draft.proposal"] += len(whole)
    found.open += compared.open
    numbers = {one.committed: number for number, one in enumerate(replay.rounds)}
    for wrong in compared.wrong:
        deserved = " or ".join(map(str, wrong.deserved))
        index = f"drafts accepted behind {wrong.committed + 1} tokens"
        found.divergences.append(_wrong("draft.proposal", replay, numbers[wrong.committed], index, deserved, wrong.used))


def _rows(pair: Pair, trace: Trace, replay: RequestReplay, read: Read, found: RecordingComparison) -> None:
    """What the draft's pool has of each committed token."""
    records = [number for number, record in enumerate(trace.header.records) if "draft_kv" in record.tensors]
    if not records or trace.header.engine.tp > 1 or pair.draft.layers:
        return
    exact = stored_rows(pair.draft, replay.tokens, read.hidden)
    most = _TF32 if trace.header.engine.device == "cuda" else FLOAT32.relative
    if pair.precision is not None:
        most = pair.precision.rows(replay.tokens, exact)
    for number in records:
        record, at = trace.header.records[number], trace.array(number, "draft_rows")
        known = at < len(exact)  # a round in flight may have stored more than was committed in the end
        stored = trace.array(number, "draft_kv")[known]
        found.checked["draft.kv"] += len(stored)
        share = off_by(exact[at[known]], stored).max((1, 2)) if len(stored) else np.empty(0)
        for row, off in zip(at[known].tolist(), share.tolist(), strict=True):
            if off > most:
                right, wrong = (
                    f"the head's row of this text, within {most:.2g} of its largest number",
                    f"a row that is {off:.2g} off",
                )
                found.divergences.append(divergence_of(record, "draft.kv", f"row {row}", right, wrong, step=0))
                break


def _wrong(
    rule: str, replay: RequestReplay, number: int, index: str, expected: object, actual: object, step: int = 0
) -> Divergence:
    return Divergence(
        rule=rule,
        request=replay.name,
        round=number,
        stage="draft" if rule == "draft.proposal" else "verify",
        step=step,
        iteration=0,
        index=index,
        expected=str(expected),
        actual=str(actual),
    )
