"""What a trace shows to have happened: of each of FEATURES, whether the case reached it."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import Key, Record, accept_lengths
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.families.dimensions import FEATURES, HAPPENED
from eagletwin.reference.sampling import target_distribution

from .model import model_of
from .replay import RequestReplay, Round, impossible_requests
from .request_logits import allowed_tokens, end_of, text_of
from .rules.sessions import session_evidence
from .trees import parents_of


def exercised_features(trace: Trace, replays: dict[str, RequestReplay]) -> tuple[str, ...]:
    """Names of the features, in the order of FEATURES."""
    evidence = Evidence(trace, replays)
    return tuple(name for name in FEATURES if PREDICATES[name](evidence))


class Evidence:
    """A trace as the predicates look at it.

    prefills  records of chunks; chunks: those of them that are not the last of their prompt; first: of each request that with
              which it begins; restarts: those with which one begins anew; hits: first chunks that do not begin at 0
    verified  records of verify; rounds: of all requests, as replay.py has them
    decoded   the requests of each decode batch, in order; neighbours: each with the next
    switches  of each decode batch whose number of steps is not that of the batch before it the two, where steps are adaptive
    samples   of each request that is a sample of a prompt the one that was to leave the prompt in the prefix cache
    """

    def __init__(self, trace: Trace, replays: dict[str, RequestReplay]) -> None:
        self.trace, self.replays, self.case = trace, replays, trace.header.case
        self.layers = model_of(trace.header).mtp_layers > 0
        self.records = list(enumerate(trace.header.records))
        self.prefills, self.verified = self.of("prefill"), self.of("verify")
        self.chunks = [record for record in self.prefills if not record.numbers["final"]]
        # accept length and steps of each round
        steps = [record.numbers.get("steps", self.case.num_steps) for record in self.verified]
        self.accepted = list(zip(accept_lengths(self.verified), steps, strict=True))
        of_batch = {record.iteration: record.numbers["steps"] for record in self.verified if "steps" in record.numbers}
        by_batch = [of_batch[iteration] for iteration in sorted(of_batch)]
        self.switches = [(before, after) for before, after in itertools.pairwise(by_batch) if before != after]
        batches: dict[int, set[str]] = {}
        for record in self.verified:
            batches.setdefault(record.iteration, set()).add(record.request)
        self.decoded = [batches[iteration] for iteration in sorted(batches)]
        self.neighbours = list(itertools.pairwise(self.decoded))
        self.sessions = session_evidence(trace, replays)
        self.first, self.restarts = _begun(trace.header.records)
        own = self.sessions.get("session_goes_on", ())
        begun = (record for record in self.prefills if record.key in self.first and record.request not in own)
        self.hits = [record for record in begun if record.numbers["start"] > 0]
        self.requests = {request.id: request for request in self.case.requests}
        first = {request.id: request.prompt for request in self.case.requests if not request.max_new_tokens}
        samples = (request for request in self.case.requests if first.get(request.after) == request.prompt)
        self.samples = {request.id: request.after for request in samples}
        self.grammars = {request.id: request.grammar for request in self.case.requests if request.grammar is not None}
        self.backend = self.case.engine.sglang.grammar_backend
        self.rounds = [round for replay in replays.values() for round in replay.rounds]
        self.batches = {record.iteration: record.step for record in self.of("batch")}
        self.aborted = {record.request for record in self.of("finished") if record.numbers["aborted"]}

    def of(self, stage: str) -> list[Record]:
        return [record for _, record in self.records if record.stage == stage]

    def continues(self, record: Record) -> bool:
        """Whether a chunk goes on where an earlier chunk of the same request ended."""
        return any(
            other.request == record.request and other.round == record.round and other.numbers["end"] == record.numbers["start"]
            for other in self.prefills
        )

    def tail_differs(self, record: Record) -> bool:
        """Whether the target's argmax at a chunk's end is not the next token. Of a recording nobody knows, nor of a chunk
        that ends behind all that the request has, which a rule names."""
        replay, end = self.replays[record.request], record.numbers["end"]
        known = replay.target_rows is not None and end < min(len(replay.tokens), len(replay.target.logits) + 1)
        return known and int(replay.target.logits[end - 1].argmax()) != replay.tokens[end]

    def several_adapters(self, batch: set[str]) -> bool:
        return len({self.requests[name].adapter for name in batch}) > 1

    def begins_like_another(self, record: Record) -> bool:
        """Whether the prefix cache could take rows of another adapter for those of a request, whose first chunk this is."""
        first = record.key in self.first
        page, prompt = self.case.page_size + 1, self.requests[record.request].prompt  # a key is a pair of tokens
        return (
            first
            and self.case.engine.sglang.radix_cache
            and len(prompt) > page
            and any(
                other.iteration < record.iteration
                and self.requests[other.request].adapter != self.requests[record.request].adapter
                and self.requests[other.request].prompt[:page] == prompt[:page]
                for other in self.prefills
            )
        )

    def goes_on(self, record: Record) -> bool:
        """Whether another prompt shares more with this one than was reused."""
        start, prompt = record.numbers["start"], self.requests[record.request].prompt
        return start + 1 < len(prompt) and any(
            other.prompt[: start + 1] == prompt[: start + 1] for name, other in self.requests.items() if name != record.request
        )

    def changes_parent(self, round: Round) -> bool:
        """At step j, branch b: whether the candidate expanded there was proposed by another branch."""
        topk = self.case.topk
        return any((node // topk - 1) % topk != at % topk for at, node in enumerate(round.expanded[topk:]))

    def looks_past(self, number: int, record: Record) -> bool:
        """Whether the last layer's window of a chunk in between ends behind the prompt, whose last token is the last known."""
        if record.stage != "prefill" or record.numbers["final"]:
            return False
        return record.numbers["end"] + self.case.num_steps - 1 > self.replays[record.request].known[number]

    def crosses_page(self, record: Record) -> bool:
        first, page = record.numbers["seq_len"], self.case.page_size
        return first // page != (first + record.numbers.get("steps", self.case.num_steps) - 1) // page

    def shared_chunk(self) -> bool:
        batches: dict[int, set[bool]] = {}  # prefill batch -> whether its chunks are the last of their prompts
        for record in self.prefills:
            batches.setdefault(record.forward, set()).add(bool(record.numbers["final"]))
        return any(len(kinds) == 2 for kinds in batches.values())

    def host_slot_given_again(self) -> bool:
        """Whether a slot of the host was written to a second time. A flush gives all of them back."""
        if any(event.kind == "flush" for event in self.case.events):
            return False
        written = [
            slot
            for number, record in self.records
            if record.stage == "copy" and not record.numbers["restore"]
            for slot in self.trace.integers(number, "host")
        ]
        return len(set(written)) < len(written)

    def one_token_tail(self, record: Record) -> bool:
        numbers = record.numbers
        return bool(numbers["final"]) and numbers["end"] - numbers["start"] == 1 and self.continues(record)

    def stopped_early(self, number: int, record: Record) -> bool:
        return (
            not record.numbers["aborted"]
            and len(self.trace.tensor(number, "tokens")) < self.requests[record.request].max_new_tokens
        )

    def has_samples(self, batch: set[str]) -> bool:
        """Whether a batch has two samples of one prompt."""
        first = [self.samples[name] for name in batch if name in self.samples]
        return len(set(first)) < len(first)

    def another_plainly(self, number: int, record: Record) -> bool:
        """Whether plain decode has another token where it was asked, by a rule that no divergence is left of."""
        if record.stage != "plain":
            return False
        replay = self.replays[record.request]
        says = self.trace.integers(number, "tokens")
        return says != replay.tokens[len(replay.prompt) : len(replay.prompt) + len(says)]

    def coin_refuses(self, number: int, record: Record) -> bool:
        """Whether a child of the last accepted node had a chance."""
        round = self.replays[record.request].rounds[record.round]
        parents, last = parents_of(self.case, round), round.path[-1] if round.path else 0
        tokens = [round.drafted[node - 1] for node, parent in enumerate(parents or ()) if parent == last]
        chances = self.trace.tensor(number, "target_probabilities")[-1]
        return self.case.sampling_of(record.request) is not None and any(float(chances[token]) > 0 for token in tokens)

    def min_p_cuts(self, record: Record) -> bool:
        """Whether min_p left fewer tokens, after an accepted node, than top_k and top_p."""
        sampling, replay = self.case.sampling_of(record.request), self.replays[record.request]
        if sampling is None or not sampling.min_p or replay.target_rows is None:
            return False
        round = replay.rounds[record.round]
        rows = torch.from_numpy(replay.target.logits[round.committed : round.end])
        cuts = (sampling.temperature, sampling.top_k or rows.shape[-1], sampling.top_p)
        return bool(((target_distribution(rows, *cuts) > 0) & (target_distribution(rows, *cuts, sampling.min_p) == 0)).any())

    def changed_rows(self, record: Record) -> tuple[Array, Array] | None:
        """The target's logits after each accepted node [n, V], before the request's own changes and with them; None: it changes
        nothing, or the reference has no rows."""
        replay = self.replays[record.request]
        if replay.target_rows is None or replay.target.plain is None:
            return None
        rows = slice(replay.rounds[record.round].committed, replay.rounds[record.round].end)
        return replay.target.plain[rows], replay.target.logits[rows]

    def logits_changed(self, record: Record) -> bool:
        """Whether the request's own changes made another token the best one, after an accepted node."""
        rows = self.changed_rows(record)
        return rows is not None and bool((rows[0].argmax(-1) != rows[1].argmax(-1)).any())

    def held_back(self, record: Record) -> bool:
        """Whether, after an accepted node, the best token had min_new_tokens against it."""
        rows, least = self.changed_rows(record), self.requests[record.request].min_new_tokens
        if rows is None or not least or record.request in self.grammars:
            return False
        best = rows[0].argmax(-1)
        return bool(np.isneginf(rows[1][np.arange(len(best)), best]).any())

    def drafted(self, record: Record) -> list[tuple[list[int], int]]:
        """Of the nodes of a round whose parent is in the text of the request's grammar: what comes before, and their token."""
        grammar, replay = self.grammars.get(record.request), self.replays[record.request]
        round = replay.rounds[record.round]
        parents = parents_of(self.case, round)
        if grammar is None or parents is None:
            return []
        paths, found = [replay.tokens[len(replay.prompt) : round.committed + 1]], list[tuple[list[int], int]]()
        for parent, token in zip(parents[1:], round.drafted, strict=True):
            paths.append([*paths[parent], token])
            if text_of(grammar, paths[parent], self.backend) is not None:
                found.append((paths[parent], token))
        return found

    def refused(self, record: Record) -> bool:
        size, backend, grammar = model_of(self.trace.header).vocab_size, self.backend, self.grammars.get(record.request)
        return grammar is not None and any(
            not allowed_tokens(grammar, text_of(grammar, sent, backend) or "", size, backend)[token]
            for sent, token in self.drafted(record)
        )

    def ends_in_tree(self, record: Record) -> bool:
        return any(end_of(self.grammars[record.request], [*sent, token]) is not None for sent, token in self.drafted(record))

    def ends_in_path(self, record: Record) -> bool:
        grammar, replay = self.grammars.get(record.request), self.replays[record.request]
        end = None if grammar is None else end_of(grammar, replay.tokens[len(replay.prompt) :])
        round = replay.rounds[record.round]
        return end is not None and round.committed < len(replay.prompt) + end < round.end

    def streamed(self, number: int, record: Record) -> bool:
        sent = self.trace.array(number, "sent") if "sent" in record.tensors else np.zeros((0, 3))
        return self.requests[record.request].stream and len(sent) > 1 and bool((sent[:-1, 0] > 1).any())

    def unfinished_prefills(self) -> set[str]:
        """Requests of which a chunk ran, and never the last one."""
        done = {record.request for record in self.prefills if record.numbers["final"]}
        return {record.request for record in self.chunks} - done

    def under_way(self, abort: Record) -> list[Record]:
        """What a request that was aborted inside a step has of batches that were launched then, and not looked at."""
        read, launched = abort.numbers["read"], abort.numbers["launched"]
        return [one for one in self.work_of(abort.request) if read <= self.batches[one.iteration] < launched]

    def given_to_nobody(self, abort: Record) -> bool:
        """Whether it went on with a round after one that was under way: a prefill shows that this one was lost."""
        steps = [one for one in self.under_way(abort) if one.numbers.get("final", 1)]
        later = (one for one in self.work_of(abort.request) if self.batches[one.iteration] >= abort.numbers["launched"])
        following = next(later, None)
        return bool(steps) and following is not None and following.stage == "verify"

    def work_of(self, request: str) -> list[Record]:
        """Chunks and rounds of a request, each of a batch of its own."""
        return [record for _, record in self.records if record.request == request and record.stage in ("prefill", "verify")]


def _begun(records: Sequence[Record]) -> tuple[set[Key], set[Key]]:
    """The chunk with which each request begins, and those with which one begins anew: not where the chunk before ended."""
    first, restarts, before = set[Key](), set[Key](), dict[str, Record]()
    for record in (one for one in records if one.stage in ("prefill", "verify")):
        last = before.get(record.request)
        before[record.request] = record
        if record.stage != "prefill" or "mixed" in record.numbers:
            continue
        if last is None:
            first.add(record.key)
        elif last.stage == "verify" or last.numbers["final"] or last.numbers["end"] != record.numbers["start"]:
            restarts.add(record.key)
    return first, restarts


PREDICATES: dict[str, Callable[[Evidence], bool]] = {
    "chunked_prefill": lambda run: bool(run.chunks),
    "chunk_tail_differs": lambda run: any(map(run.tail_differs, run.chunks)),
    "draft_decode": lambda run: any(round.steps >= 2 for round in run.rounds) and bool(run.of("draft")) and not run.layers,
    "rejection": lambda run: any(length <= steps for length, steps in run.accepted),
    "accept_all": lambda run: any(length == steps + 1 for length, steps in run.accepted),
    "accept_some": lambda run: any(1 < length <= steps for length, steps in run.accepted),
    # layer k has consumed d[1..k]: of all layers, every draft but the last
    "look_ahead_rejected": lambda run: (
        run.layers and any(len(round.path) < run.case.num_steps for round in run.rounds if round.path)
    ),
    "look_ahead_past_prompt": lambda run: run.layers and any(itertools.starmap(run.looks_past, run.records)),
    "tree": lambda run: run.case.topk > 1 and bool(run.rounds),
    "path_not_in_front": lambda run: any(round.path != list(range(len(round.path))) for round in run.rounds),
    "branch_changes_parent": lambda run: any(map(run.changes_parent, run.rounds)),
    "branch_holes": lambda run: run.case.topk > 1 and any(round.committed % run.case.page_size for round in run.rounds),
    "batch": lambda run: any(len(batch) > 1 for batch in run.decoded),
    "batch_grows": lambda run: any(before & after and after - before for before, after in run.neighbours),
    "batch_shrinks": lambda run: any(before & after and before - after for before, after in run.neighbours),
    "page_crossed_in_draft": lambda run: run.case.page_size > 1 and any(map(run.crosses_page, run.verified)),
    "prompt_ends_in_page": lambda run: any(
        record.numbers["final"] and record.numbers["end"] % run.case.page_size for record in run.prefills
    ),
    # one that comes back where its last chunk ended shows in the answer's count alone
    "retraction": lambda run: bool(run.restarts) or any(one.numbers.get("retractions", 0) > 0 for one in run.of("finished")),
    "retraction_in_decode": lambda run: any(record.round > 0 and record.key in run.restarts for record in run.prefills),
    "chunk_ends_in_output": lambda run: any(
        record.numbers["end"] >= len(run.requests[record.request].prompt) for record in run.chunks
    ),
    "radix_hit": lambda run: bool(run.hits),
    "radix_hit_in_page": lambda run: run.case.page_size > 1 and any(map(run.goes_on, run.hits)),
    "radix_hit_across_pages": lambda run: (
        run.case.page_size > 1 and any(record.numbers["start"] > run.case.page_size for record in run.hits)
    ),
    "shared_chunk": Evidence.shared_chunk,
    "one_token_tail": lambda run: any(map(run.one_token_tail, run.prefills)),
    "early_stop": lambda run: any(run.stopped_early(n, record) for n, record in run.records if record.stage == "finished"),
    "sampled_verify": lambda run: any(
        {"coins", "places"} & {*record.tensors} and run.case.sampling_of(record.request) is not None for record in run.verified
    ),
    "coin_refuses": lambda run: any(
        run.coin_refuses(n, record) for n, record in run.records if "target_probabilities" in record.tensors
    ),
    "logits_changed": lambda run: any(map(run.logits_changed, run.verified)),
    "impossible": lambda run: bool(impossible_requests(run.trace, run.replays)),
    "mixed_sampling": lambda run: any(
        {run.case.sampling_of(name) is None for name in batch} == {True, False} for batch in run.decoded
    ),
    "abort_in_prefill": lambda run: bool(run.aborted & run.unfinished_prefills()),
    "abort_in_decode": lambda run: bool(run.aborted & {record.request for record in run.verified}),
    **{name: shows for name, (_, shows) in HAPPENED.items()},
}
