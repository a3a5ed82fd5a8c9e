"""What happened to one request by the trace, and what should have by the reference: the judge's two columns.

The engine's own choices (committed tokens, drafts, frontiers) are followed, so that one wrong choice does not make everything
after it wrong too; the rules decide whether each choice was right. Computed once: one target forward over the final
sequences and num_steps draft forwards serve every round of every request (reference/rounds.py, and the test that this equals
the naive form).
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Adapter, Case
from eagletwin.harness.core.run_spec import Dtype
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import View
from eagletwin.harness.families import RECIPES, adapters
from eagletwin.harness.families.weights import served_pair
from eagletwin.reference import growth
from eagletwin.reference.chain import Recent, rows_behind
from eagletwin.reference.draft_heads import FrozenHead, PlainDraft
from eagletwin.reference.eagle import Head
from eagletwin.reference.layers import LowRank, apply_adapter
from eagletwin.reference.llama import Weights, target_rows
from eagletwin.reference.rounds import committed_side_by_side, draft_rounds
from eagletwin.reference.sizes import LlamaShape, count_candidates

from .bounds import bounds_of
from .choices import Choices, choices
from .engines import view_of_engine
from .experts import Nudge, Routed, Ties, routed_of
from .model import Model, model_of
from .ranks import heads
from .request_logits import apply_request_logit_changes, first_impossible

# Committed tokens of the requests that share a forward: its cost grows with the square, and that of many small ones with
# their number.
_TOGETHER = 256


# Scratch rows of the rounds that share a forward; its cost grows with the square.
_SCRATCH_TOGETHER = 1024


_KEPT = ("state", "window")  # of a layer in the reference (state_layers.py)


class NoReference(ValueError):
    """What a request drew and then lost cannot be followed: there is nothing to compare the trace with."""


@dataclass(slots=True)
class Round:
    """One verify round. D = num_draft_tokens, k = topk, S = num_steps, of this round where steps are adaptive.

    steps      S; nodes: D
    committed  M when it began; end: M when it was over (M if never verified)
    drafted    tokens of nodes 1..D-1
    selected   candidates that became nodes 1..D-1
    expanded   candidates of each step's frontier [(S-1)*k], and their tokens: frontier
    path       accepted nodes
    penalized  [end - M, V] logits that its tokens were chosen by, where penalties count what was sent before it, and another
               one began within its rows, as after a retraction that lost this one; None: those of the rows
    proposed   tokens of all candidates; none where the trace has them only as they were expanded and selected
    """

    steps: int
    nodes: int
    committed: int
    bonus: int
    drafted: list[int]
    selected: list[int]
    expanded: list[int]
    frontier: list[int]
    end: int
    path: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    penalized: Array | None = None


@dataclass(slots=True)
class ReferenceRows:
    """What the reference says of n committed rows, for the judge to compare: it does so in numpy, whose small operations cost a
    third of torch's.

    hidden [n, H or A*H], logits [n, V]; of a draft with topk > 1, their log_softmax: logs [n, V]; plain [n, V]: logits before a
    request's own changes, where it wants some; given [n, H]: the target's states that a request is given, where it wants them
    """

    hidden: Array
    logits: Array
    logs: Array | None = None
    plain: Array | None = None
    given: Array | None = None


@dataclass(slots=True)
class Grown:
    """What the reference says of one round's drafting: reference/growth.py's Growth, scratch rows as the trace has them.

    logits [R, V], hidden and handed_on [S-1, k, H], scratch [S-1, k, 2, L, G, D]; G: the heads of the trace's rank
    chosen [S-1, k, L, K]: the rows that each scratch row attends to, of a model with an indexer
    """

    logits: Array
    hidden: Array
    handed_on: Array
    scratch: Array
    chosen: Array


@dataclass(slots=True)
class RequestReplay:
    """One request.

    tokens   [T] everything committed by the end, prompt first; x[T-1] is the last bonus token. A plain draft has a row of it
             too: T rows
    adapter  what its target is changed by
    rounds   by verify ordinal
    target_rows, draft_rows  rows 0..T-2 of the reference, once they are computed
    growths  one per round, and what of its choices the reference can tell: choices
    stored   KV rows 0..T-2 of the reference, of "target" and "draft" [T-1, 2, L, G, D]; G: the heads of the trace's rank
    chosen   of a model with an indexer, the rows that each of these attends to [T-1, L, K]
    earlier  of the target those of a pipeline's earlier stages: [T-1, 2, L, G, D], L its layers before the last stage's first
    kept     of layers that keep a state, after each of these rows: the states [T-1, L, N, W, D], and the inputs of the
             convolution [T-1, L, C, K-1]
    compressors  of layers with compressed rows, what their compressors keep of each of these rows [T-1, C], by layer
    rerouted a row of it was computed twice, and went to other experts
    lives    iterations in which its rows began to be computed again, of a model whose rows choose
    impossible  the first row in which no token is allowed by what the request asks for; None: there is none
    strict_penalties  as in EngineView
    known    prefill or extend record -> M, the last token that was known when it was over

    A recording has no reference: its replays are tokens and rounds.

    Of a draft of several layers, multi_layer_draft.py works out what there is in place of draft, growths and choices.
    """

    name: str
    prompt: tuple[int, ...]
    tokens: list[int]
    adapter: Adapter | None = None
    rounds: list[Round] = field(default_factory=list)
    target_rows: ReferenceRows | None = None
    draft_rows: ReferenceRows | None = None
    growths: list[Grown] = field(default_factory=list)
    choices: list[Choices] = field(default_factory=list)
    stored: dict[str, Array] = field(default_factory=dict)
    chosen: dict[str, Array] = field(default_factory=dict)
    earlier: Array | None = None
    kept: tuple[Array, Array] | None = None
    compressors: tuple[Array, ...] = ()
    known: dict[int, int] = field(default_factory=dict)
    rerouted: bool = False
    lives: list[int] = field(default_factory=list)
    impossible: int | None = None
    strict_penalties: bool = False

    def goes_on_behind(self, row: int) -> bool:
        """Whether a token is told behind this row. None is where an engine goes on from a prompt that it has half read."""
        return row + 1 < len(self.tokens)

    def chosen_by(self, round: Round) -> Array:
        """Logits [end - M, V] that a round's tokens were chosen by. Raises ValueError if the reference has none."""
        return self.target.logits[round.committed : round.end] if round.penalized is None else round.penalized

    def allowing(self, rows: range) -> range:
        """Those of these rows that come before the first one in which no token is allowed."""
        return rows if self.impossible is None else range(rows.start, min(rows.stop, max(rows.start, self.impossible)))

    @property
    def target(self) -> ReferenceRows:
        """Rows of the target. Raises ValueError if the reference has none."""
        return self._require_rows(self.target_rows, "target")

    @property
    def draft(self) -> ReferenceRows:
        """Rows of a draft of one layer. Raises ValueError if the reference has none."""
        return self._require_rows(self.draft_rows, "draft")

    def _require_rows(self, rows: ReferenceRows | None, of: str) -> ReferenceRows:
        if rows is None:
            raise ValueError(f"there are no rows of the {of} for request {self.name}")
        return rows

    def said(self) -> list[bytes]:
        """All numbers of the reference that follow from choices of experts."""
        rows = [one for one in (self.target_rows, self.draft_rows) if one is not None]
        arrays = [array for one in rows for array in (one.hidden, one.logits)]
        return [array.tobytes() for array in (*arrays, *(array for one in self.growths for array in (one.logits, one.hidden)))]

    def token(self, index: int) -> int | None:
        """x[index], or None if it was never committed."""
        return self.tokens[index] if 0 <= index < len(self.tokens) else None


def replay_requests(trace: Trace, view: View, ties: Ties = None) -> dict[str, RequestReplay]:
    """The replay of every request of the case, with the reference's rows filled in, in this view.

    ties: how ties in choices of experts are decided, where not as they are.

    Of a recording they are not filled in: the reference has no weights for it."""
    case, dtype = trace.header.case, trace.header.engine.dtype
    model = model_of(trace.header, view)
    by_request = _follow_trace(trace, model)
    if not model.numbers:
        return by_request
    for request in case.requests:
        replay = by_request[request.id]
        most = len(request.prompt) + request.max_new_tokens + 2 * case.most_nodes
        if len(replay.tokens) > most:  # the reference's memory grows with the square of this
            raise ValueError(f"request {request.id} has {len(replay.tokens)} committed tokens; it can have {most} at most")
    routed = None
    if ties is not None and not isinstance(ties, Nudge):
        life = None if isinstance(ties, str) else ties
        routed = routed_of(trace, by_request, bounds_of(dtype, case.model), model.ahead, life)
        for name, replay in by_request.items():
            replay.rerouted, replay.lives = name in routed.again, routed.lives.get(name, [])
    nudge = ties if isinstance(ties, Nudge) else None
    pack: list[RequestReplay] = []
    # one forward has one target: requests of one adapter follow each other, those of none come first
    for replay in sorted(by_request.values(), key=lambda one: "" if one.adapter is None else repr(one.adapter)):
        if len(replay.tokens) < 2:
            continue
        other_target = bool(pack) and pack[-1].adapter != replay.adapter
        if pack and (other_target or sum(len(other.tokens) for other in (*pack, replay)) > _TOGETHER):
            _fill(case, pack, view, dtype, nudge, routed)
            pack = []
        pack.append(replay)
    if pack:
        _fill(case, pack, view, dtype, nudge, routed)
    if trace.header.engine.tp > 1:
        for replay in by_request.values():
            replay.stored = {part: rows[..., heads(trace.header, part), :] for part, rows in replay.stored.items()}
            for growth in replay.growths:
                growth.scratch = growth.scratch[..., heads(trace.header, "draft"), :]
    if first := trace.header.engine.first_layer:  # of a pipeline's last stage
        for replay in by_request.values():
            if "target" in replay.stored:
                rows = replay.stored["target"]
                replay.stored["target"], replay.earlier = rows[:, :, first:], rows[:, :, :first]
    return by_request


def _follow_trace(trace: Trace, model: Model) -> dict[str, RequestReplay]:
    """The replays as the trace has them: what the engine chose, and nothing of the reference yet."""
    case = trace.header.case
    strict = view_of_engine(trace.header.engine.name).strict_penalties
    begun = partial(RequestReplay, strict_penalties=strict)
    by_request = {one.id: begun(one.id, one.prompt, list(one.prompt), one.adapter) for one in case.requests}
    retracted: list[tuple[str, list[int], int]] = []  # request, what it had committed, and how much of that was prefilled again
    prefilled_to = _ends_of_prefills(trace)
    frontiers: dict[str, list[int]] = {}  # tokens that draft decode consumed in the round that is being drafted, by request
    for number, record in enumerate(trace.header.records):
        replay = by_request.get(record.request)
        if replay is None:
            continue
        if record.stage == "extend":
            replay.known[number] = len(replay.tokens) - 1
        elif record.stage == "prefill" and not record.numbers["final"]:
            # With overlap a retraction loses what was in flight: the worker knows what its last chunk will end with, no more.
            # Where an abort leaves none, it says itself how many tokens it has. Traces from before it did have them all, and
            # so has one that says what cannot be.
            has = prefilled_to.get(number) or (record.numbers.get("tokens", 0) if trace.header.engine.overlap else 0)
            replay.known[number] = (has if record.numbers["end"] < has < len(replay.tokens) else len(replay.tokens)) - 1
        elif record.stage == "prefill":
            replay.known[number] = record.numbers["end"]
            before = replay.tokens
            replay.tokens = [*before[: record.numbers["end"]], int(trace.tensor(number, "next_token")[0])]
            if len(before) > record.numbers["end"]:
                retracted.append((record.request, before, record.numbers["end"]))
        elif record.stage == "draft.decode":
            before = frontiers.get(record.request, []) if record.step > 1 else []
            if record.step > 0:  # the row of the bonus token comes before any frontier
                frontiers[record.request] = before + trace.integers(number, "input_ids")
        elif record.stage == "draft":
            consumed = frontiers.pop(record.request, [])
            if "consumed" in record.tensors:  # draft decode ran in a graph
                consumed = trace.integers(number, "consumed")
            replay.rounds.append(_round(trace, number, replay, consumed, model))
        elif record.stage == "verify":
            round = replay.rounds[-1]
            round.path = trace.integers(number, "accept_index")
            replay.tokens += _accepted_drafts(round, trace.integers(number, "predicted"), record.numbers["bonus"])
            round.end = len(replay.tokens) - 1
    _restore_lost_rounds(case, by_request, retracted)
    if case.topk == 1:
        for name, consumed in frontiers.items():  # draft() never returned: this round drafted what is known, and zeros
            drafted = consumed + [0] * (case.most_steps - len(consumed))
            by_request[name].rounds.append(_chain(len(drafted), by_request[name], drafted))
    return by_request


def _ends_of_prefills(trace: Trace) -> dict[int, int]:
    """Of each chunk: how many tokens the request has when its last chunk is prefilled. Of one that never is: nothing."""
    ends, coming = dict[int, int](), dict[str, int]()
    for number, record in reversed(list(enumerate(trace.header.records))):
        if record.stage != "prefill":
            continue
        if record.numbers["final"]:
            coming[record.request] = record.numbers["end"]
        elif record.request in coming:
            ends[number] = coming[record.request]
    return ends


def _restore_lost_rounds(case: Case, by_request: dict[str, RequestReplay], retracted: list[tuple[str, list[int], int]]) -> None:
    """With overlap the round in flight is lost in a retraction; if the request ends before it gets so far again, the reference
    still needs what that round committed, all of which goes on as greedy decoding does. Raises NoReference where it drew
    others: in a case that samples and is retracted, by an event or by a pool that is too small.
    """
    longest: dict[str, list[int]] = {}
    for name, before, end in retracted:
        if len(before) > max(end + 1, len(longest.get(name, ()))):
            longest[name] = before
    for name, before in longest.items():
        replay = by_request[name]
        if len(before) > len(replay.tokens) and before[: len(replay.tokens)] == replay.tokens:
            replay.tokens = before
    for name, before, _ in retracted:
        tokens = by_request[name].tokens
        kept = min(len(before), len(tokens))
        if case.sampling_of(name) is not None and before[:kept] != tokens[:kept]:
            raise NoReference(
                f"request {name} lost a round in a retraction, and drew other tokens after it: there is no reference for what "
                "the lost round committed"
            )


def _chain(steps: int, replay: RequestReplay, drafted: list[int]) -> Round:
    """A round of topk = 1: everything there is, and each step expands the one candidate there is."""
    committed, chain = len(replay.tokens) - 1, list(range(steps))
    return Round(steps, steps + 1, committed, replay.tokens[-1], drafted, chain, chain[:-1], drafted[:-1], committed)


def _undrafted_round(case: Case, replay: RequestReplay, drafted: list[int]) -> Round:
    """A round of a tree that nobody drafted: its nodes are the first candidates, and each step expands the first there are.
    The engine's convention of pipelines, whose nodes are zeros in a request's first round."""
    chosen, expanded = list(range(case.verify_nodes - 1)), list(range((case.num_steps - 1) * case.topk))
    sizes = (case.num_steps, case.verify_nodes)
    committed = len(replay.tokens) - 1
    return Round(*sizes, committed, replay.tokens[-1], drafted, chosen, expanded, [0] * len(expanded), committed)


def _accepted_drafts(round: Round, predicted: list[int], bonus: int) -> list[int]:
    """Tokens that verify decided to commit: those of the accepted nodes, and the bonus token.

    predicted: the same as the worker hands them on, after the path was moved to the front; verify.py compares the two.
    """
    nodes = round.path[1:]
    if not round.path or any(not 1 <= node <= len(round.drafted) for node in nodes):
        return predicted
    return [*(round.drafted[node - 1] for node in nodes), bonus]


def _round(trace: Trace, number: int, replay: RequestReplay, consumed: list[int], model: Model) -> Round:
    case, drafted, committed = trace.header.case, trace.integers(number, "tokens")[1:], len(replay.tokens) - 1
    if case.topk == 1:
        return _chain(trace.header.records[number].numbers.get("steps", case.num_steps), replay, drafted)
    if trace.header.records[number].numbers.get("undrafted"):
        return _undrafted_round(case, replay, drafted)
    expanded, selected = trace.integers(number, "expanded"), trace.integers(number, "selected")
    proposed: list[int] = []
    if model.mtp_layers or not (model.numbers or consumed):  # no frontier was ever consumed, or that of a server in graphs
        consumed = []
    elif len(consumed) != len(expanded):
        raise ValueError(f"{len(consumed)} tokens were consumed by draft decode, and {len(expanded)} candidates were expanded")
    elif "candidate_tokens" in trace.header.records[number].tensors:
        proposed = trace.integers(number, "candidate_tokens")
    sizes = (case.num_steps, case.verify_nodes)
    return Round(*sizes, committed, replay.tokens[-1], drafted, selected, expanded, consumed, committed, proposed=proposed)


@lru_cache(maxsize=8)
def _reference_target(model: str, dtype: Dtype, nudge: Nudge | None) -> Weights:
    """The recipe's target in float64, as an engine of this type loads it."""
    weights = served_pair(model, dtype).reference_target()
    return weights if nudge is None else nudge.of("target", weights)


@lru_cache(maxsize=64)
def _adapted_target(model: str, dtype: Dtype, adapter: Adapter) -> Weights:
    """The same with an adapter: of a model without experts, whose choices may be nudged."""
    exact = {
        name: LowRank(part.down.double(), part.up.double(), part.scale)
        for name, part in adapters.make_adapter(model, adapter).items()
    }
    return apply_adapter(_reference_target(model, dtype, None), exact)


@lru_cache(maxsize=8)
def reference_heads(model: str, dtype: Dtype, nudge: Nudge | None = None) -> tuple[Head, ...]:
    """The recipe's heads in float64, by layer; a single one drafts on by itself."""
    heads = served_pair(model, dtype).reference_heads(RECIPES[model])
    return heads if nudge is None else tuple(replace(head, weights=nudge.of("draft", head.weights)) for head in heads)


def _head(case: Case, dtype: Dtype, view: View, nudge: Nudge | None) -> Head:
    """The head, or the first of several, run as it is held to in this view; with the window of the case, if it is its own."""
    head, window = reference_heads(case.model, dtype, nudge)[0], case.engine.sglang.draft_window
    if window and RECIPES[case.model].own_window:
        return replace(head, shape=replace(head.shape, windows=(window,) * head.shape.num_layers))
    return replace(head, ahead=1) if view == "shifted" and isinstance(head, PlainDraft) else head


def _fill(case: Case, pack: list[RequestReplay], view: View, dtype: Dtype, nudge: Nudge | None, routed: Routed | None) -> None:
    """Fill the reference's rows in, of all these requests in the same forwards."""
    shape, weights = RECIPES[case.model].target, _reference_target(case.model, dtype, nudge)
    if pack[0].adapter is not None:
        weights = _adapted_target(case.model, dtype, pack[0].adapter)
    # An id outside the vocabulary is a divergence that a rule reports; here it only must not break the arithmetic.
    tokens = [torch.from_numpy(np.array(replay.tokens, np.int64).clip(0, shape.vocab_size - 1)) for replay in pack]
    lengths = [len(sequence) - 1 for sequence in tokens]
    if routed is not None:
        weights = dict(routed.target(weights, shape, pack))
    target = target_rows(weights, shape, torch.cat([sequence[:-1] for sequence in tokens]), lengths)
    stored, draft = {"target": stored_rows(target.keys, target.values)}, None
    head = _head(case, dtype, view, nudge)
    if isinstance(head, FrozenHead):
        head = replace(head, memory=(target.keys, target.values))
    plain = head
    drafted = [rows_behind(head, length) for length in lengths]
    if routed is not None:
        head = routed.draft(head, pack, drafted)
    given = (target.normed if shape.aux_layers else target.hidden).numpy() if case.gives_states else None
    of_target, of_draft = ReferenceRows(target.hidden.numpy(), target.logits.numpy(), given=given), None
    if not RECIPES[case.model].mtp_layers:
        draft = committed_side_by_side(head, tokens, target.hidden)
        if RECIPES[case.model].drafts:
            stored["draft"] = stored_rows(draft.keys, draft.values)
        logs = draft.logits.log_softmax(-1).numpy() if case.topk > 1 else None
        of_draft = ReferenceRows(draft.hidden.numpy(), draft.logits.numpy(), logs)
    kept = [np.stack([getattr(layer, part).numpy() for layer in target.kept], 1) for part in _KEPT] if target.kept else None
    begin = draft_begin = 0
    for replay, length, rows_of_draft in zip(pack, lengths, drafted, strict=True):
        own, its = slice(begin, begin + length), slice(draft_begin, draft_begin + rows_of_draft)
        replay.target_rows = _with_request_logits(case, replay, _part(of_target, own))
        replay.draft_rows = None if of_draft is None else _part(of_draft, its)
        replay.kept = None if kept is None else (kept[0][own], kept[1][own])
        replay.compressors = tuple(layer[own].numpy() for layer in target.compressors)
        for of, rows in stored.items():
            replay.stored[of], replay.chosen[of] = _without_choices(shape, rows[own if of == "target" else its])
        begin, draft_begin = own.stop, its.stop
    if draft is None:
        return
    rounds = [(n, replay, round) for n, replay in enumerate(pack) for round in replay.rounds]
    ordinals = [(replay.name, number) for replay in pack for number in range(len(replay.rounds))]
    at_once, settings = max(1, _SCRATCH_TOGETHER // (case.most_steps * case.topk)), case.engine.sglang
    # what draft decode reads of the committed rows: all, if the head has a window of its own
    reads = Recent() if RECIPES[case.model].own_window else Recent(settings.draft_window, settings.draft_sink)
    tree: growth.View = "true_tree" if view == "true_tree" else "slot_layout"
    for first in range(0, len(rounds), at_once):
        some = rounds[first : first + at_once]
        consumed = _frontiers(case, [round for _, _, round in some])
        starts = [(n, rows_behind(head, round.committed)) for n, _, round in some]
        by_step: Head | list[Head] = plain
        if routed is not None:
            by_step = routed.decode(plain, ordinals[first : first + at_once], case.most_steps, case.topk)
        growths = draft_rounds(by_step, draft, drafted, starts, *consumed, tree, reads)
        ranked = choices(case, growths, [round.selected for _, _, round in some], bounds_of(dtype, case.model))
        scratch = _without_choices(shape, _parts(growths.keys, growths.values, 3).numpy())
        parts = (growths.logits.numpy(), growths.hidden.numpy(), growths.handed_on.numpy(), *scratch)
        for (_, replay, _), choice, *part in zip(some, ranked, *parts, strict=True):
            replay.growths.append(Grown(*part))
            replay.choices.append(choice)


def _frontiers(case: Case, rounds: list[Round]) -> tuple[Tensor, Tensor]:
    """What the rows of each step of these rounds consumed, and which candidates they were [C, S-1, k] each."""
    shape, most = (len(rounds), case.most_steps - 1, case.topk), RECIPES[case.model].target.vocab_size - 1
    consumed, expanded = (np.array(part, np.int64) for part in zip(*(_of_most_steps(case, one) for one in rounds), strict=True))
    frontier = consumed.reshape(shape).clip(0, most)
    # each candidate one of its step's depth: another is a divergence that a rule reports
    first = np.array([0, *(count_candidates(case.topk, step) for step in range(1, case.most_steps))])[:, None]
    return torch.from_numpy(frontier), torch.from_numpy(expanded.reshape(shape).clip(first[:-1], first[1:] - 1))


def _of_most_steps(case: Case, round: Round) -> tuple[list[int], list[int]]:
    """The frontiers of a round and their candidates, as if it had as many steps as the longest: rows of steps behind its last
    one change none of those before, and nobody looks at them. Only chains have rounds of different lengths."""
    if round.steps == case.most_steps:
        return round.frontier, round.expanded
    steps = case.most_steps - 1
    return (round.frontier + [0] * steps)[:steps], list(range(steps))


def _part(rows: ReferenceRows, own: slice) -> ReferenceRows:
    logs, given = (None if some is None else some[own] for some in (rows.logs, rows.given))
    return ReferenceRows(rows.hidden[own], rows.logits[own], logs, given=given)


def _with_request_logits(case: Case, replay: RequestReplay, rows: ReferenceRows) -> ReferenceRows:
    """The target's rows with the logits that tokens are chosen by: of output tokens, those that the request wants changed."""
    request = case.request(replay.name)
    began = {row: round.committed for round in replay.rounds for row in range(round.committed, round.end)}
    strict = replay.strict_penalties
    logits = apply_request_logit_changes(case, request, replay.tokens, began, rows.logits, strict=strict)
    if logits is None:
        return rows
    for round in replay.rounds if request.penalized and not strict else ():
        own = dict.fromkeys(range(round.committed, round.end), round.committed)
        if any(began[row] != round.committed for row in own):
            changed = apply_request_logit_changes(case, request, replay.tokens, own, rows.logits)
            round.penalized = None if changed is None else changed[round.committed : round.end]
    replay.impossible = first_impossible(request, logits)
    return replace(rows, logits=logits, plain=rows.logits)


def stored_rows(keys: Tensor, values: Tensor) -> Array:
    """KV rows as one tensor a row: keys, values [L, n, G, D] -> [n, 2, L, G, D]; latent rows -> [n, 1, L, 1, D]."""
    rows: Array = _parts(keys, values, 0).permute(2, 0, 1, 3, 4).numpy()
    return rows


def _without_choices(shape: LlamaShape, rows: Array) -> tuple[Array, Array]:
    """Rows [.., 1, L, 1, C+P+I+K] as a pool has them, and the rows that each attends to [.., L, K]. Other rows have K = 0."""
    width = -shape.index.chosen if shape.index is not None else rows.shape[-1]
    return rows[..., :width], rows[..., 0, :, 0, width:].astype(np.int64)


def _parts(keys: Tensor, values: Tensor, dimension: int) -> Tensor:
    """Keys and values along a new dimension; keys alone where they are latent rows."""
    return torch.stack([keys, values] if values.shape[-1] else [keys], dimension)


# Requests that ask for what cannot be: their grammar, processor, bias and min_new_tokens together allow no token somewhere.
#
# No token is right there, and what comes behind it follows from whichever an engine gave. The engine's grammar may refuse that
# one, and the request is aborted; or take it, and the request goes on. So nothing of such a request is judged from that token
# on, and the verdict says so. What comes before is judged as of any request, and so is what the scheduler and other requests
# do.


class Impossible(NamedTuple):
    """number: of the prefill or verify record that gave a token where none is allowed; token: which output token that is."""

    number: int
    token: int


def impossible_requests(trace: Trace, replays: dict[str, RequestReplay]) -> dict[str, Impossible]:
    """By request; of those that ask for nothing impossible there is nothing."""
    found = dict[str, Impossible]()
    for number, record in enumerate(trace.header.records):
        replay = replays.get(record.request)
        if replay is None or replay.impossible is None or record.request in found:
            continue
        if record.stage == "prefill" and record.numbers["final"]:
            end = record.numbers["end"]
        elif record.stage == "verify":
            end = replay.rounds[record.round].end
        else:
            continue
        if end > replay.impossible:
            found[record.request] = Impossible(number, replay.impossible + 1 - len(replay.prompt))
    return found
