"""Whether a trace holds everything that a run leaves: a tap that stopped recording must not make a wrong worker look right.

Called by the judge: `find_gaps` before it compares, `missing` when nothing diverged. They look at which records and rows are
there, never at their values.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.records import COUNTS, NODES_OF, STEPS_OF, Record, ServedModel
from eagletwin.harness.core.trace import INNER, Trace
from eagletwin.reference.sizes import count_candidates

from .compare import Compare, Place
from .engines import view_of_engine
from .experts import is_dense
from .model import Model, model_of
from .replay import Round

_FLOATS = ("kv", "state", "conv", "hidden_in", "hidden_out", "hidden", "probabilities", "logits", "scores", "coins", "logprobs")
_Consumed = Callable[[Round, int, list[int]], list[int]]
_WITH_OUTPUT = ("target.extend", "target.verify", "draft.decode")


def find_gaps(trace: Trace) -> str:
    """Which request finished without a record of its work, as where recording is switched off: what it emitted would be held to
    a replay that begins and ends with its prompt. Empty if there is none."""
    worked = {record.request for record in trace.header.records if record.stage == "prefill"}
    for record in trace.header.records:
        if record.stage == "finished" and not record.numbers.get("aborted") and record.request not in worked:
            return f"request {record.request} finished, and no record says what was computed for it: nothing was recorded"
    uncounted = _uncounted_batches(trace)
    if uncounted or trace.header.case.engine.sglang.adaptive is None or isinstance(trace.header.served, ServedModel):
        return uncounted  # a recording of a server has its request's records alone
    return _steps(trace)


def _steps(trace: Trace) -> str:
    """What is missing of the choice of steps in a case whose rounds have any number of them."""
    records = trace.header.records
    said = {record.iteration: number for number, record in enumerate(records) if record.stage == "steps"}
    for record in records:
        if record.stage in ("draft", "verify") and "steps" not in record.numbers:
            return f"a {record.stage} record does not say how many draft steps its round had"
        if record.stage == "verify" and record.iteration not in said:
            return f"what the parts of the worker hold the draft steps to be was not recorded in iteration {record.iteration}"
    for number in said.values():
        if (len(trace.array(number, "steps")), len(trace.array(number, "nodes"))) != (len(STEPS_OF), len(NODES_OF)):
            return "a part of the worker is missing where its draft steps were recorded"
    fed = [record.step for record in records if record.stage == "fed"]
    if fed != list(range(len(fed))):
        return "not all was recorded of what the choice of steps was told"
    return ""


def _missing_of_rank(records: Sequence[Record]) -> str:
    """With DP attention each batch, an idle one too, has one forward of the target, of no token where it is idle."""
    of_target = [record.numbers["tokens"] for record in records if record.stage == "gathered" and record.numbers["target"]]
    for kind, forwards in (("batch", sum(map(bool, of_target))), ("idle", of_target.count(0))):
        batches = sum(record.stage == kind for record in records)
        if batches != forwards:
            return f"{batches} records {kind}, and {forwards} forwards of the target in such batches"
    return ""


def missing(trace: Trace, model: Model) -> str:
    """What a finished run must have recorded and did not; empty if nothing is missing."""
    case, records = trace.header.case, trace.header.records
    if len({record.key for record in records}) < len(records):
        return "two records have the same key"
    if not model.numbers:
        return _missing_of_recording(trace, model)
    # a few dozen, of hundreds of tensors
    kinds = {(name, trace.array(number, name).dtype.kind) for number, record in enumerate(records) for name in record.tensors}
    strange = {(name, kind) for name, kind in kinds if (kind == "f") != name.endswith(_FLOATS)}
    for number, record in enumerate(records):
        for name in record.tensors if strange else ():
            dtype = trace.array(number, name).dtype
            if (name, dtype.kind) in strange:
                return f"{name} of a {record.stage} record is {dtype}"
        if problem := _due(trace, number, record, model):
            return f"{problem} of a {record.stage} record"
    if trace.header.engine.device == "cpu" and any(record.numbers.get("in_graph") for record in records):
        return "something ran in a CUDA graph, on a CPU"
    if trace.header.engine.dp > 1 and (problem := _missing_of_rank(records)):
        return problem
    flushed = [record.iteration for record in records if record.stage == "flushed"]
    if len(flushed) != 1:
        return "the pools were never flushed and counted"
    if sorted(record.step for record in records if record.stage == "iteration") != list(range(flushed[0] + 1)):
        return "the pool was not counted before each iteration"
    if model.states and any("hidden_out" not in record.tensors for record in records if record.stage in _WITH_OUTPUT):
        return "the outputs of a forward were not recorded"
    stages = Counter((record.request, record.stage) for record in records)
    batches = [record for record in records if record.stage == "batch"]
    ran = {record.iteration for record in records if record.stage == "prefill" or record.stage == "draft"}
    # else slots are judged by who owned them before another batch
    if sorted(record.step for record in batches) != list(range(len(batches))):
        return "the owners of slots were not recorded before each batch"
    if not ran <= {record.iteration for record in batches}:
        return "the owners of slots were not recorded in each iteration that ran a batch"
    if any(request.session and not stages[request.id, "session"] for request in case.requests):
        return "when a request of a session was handed in was not recorded"
    problem = _aborts(records, case) or _plain(trace, stages)
    if problem:
        return problem
    for request in case.requests:
        problem = _request(trace, request.id, stages, model)
        if problem:
            return f"request {request.id}: {problem}"
    return ""


def _uncounted_batches(trace: Trace) -> str:
    """Whether an abort inside a step says how many batches were launched and looked at: which result is the last follows."""
    records, under_way = trace.header.records, int(trace.header.engine.overlap)
    launched = [record.iteration for record in records if record.stage == "batch"]
    for record in records:
        if record.stage == "abort":
            numbers = record.numbers
            counted = numbers["launched"] == sum(iteration < record.iteration for iteration in launched)
            if not counted or not 0 <= numbers["launched"] - numbers["read"] <= under_way:
                return f"the batches before the abort of {record.request} were not counted"
    return ""


def _aborts(records: Sequence[Record], case: Case) -> str:
    """Of aborts inside a step each whose request had so many batches."""
    came = {record.step for record in records if record.stage == "abort"}
    worked = Counter(record.request for record in records if record.stage in ("prefill", "verify"))
    for number, event in enumerate(case.events):
        if event.step and number not in came and worked[event.request] >= event.step:
            return f"the abort of {event.request} in its step {event.step} was not recorded"
    return ""


def _plain(trace: Trace, stages: Counter[tuple[str, str]]) -> str:
    """Of requests that were sent something, and of which plain decode is asked, each whose answer is not there."""
    asked = trace.header.case.told_plainly
    for number, record in enumerate(trace.header.records if asked else ()):
        due = record.stage == "finished" and record.request in asked and len(trace.array(number, "tokens")) > 0
        if due and stages[record.request, "plain"] != 1:
            return f"what plain decode says of request {record.request} was not recorded"
    return ""


def _missing_of_recording(trace: Trace, model: Model) -> str:
    """The same of one request of a server: from its first chunk on no chunk and no round is left out."""
    header = trace.header
    records, layers = header.records, model.mtp_layers
    chunks = [record for record in records if record.stage == "prefill"]
    if not chunks or not any(record.numbers["final"] for record in chunks):
        return "its prompt was never prefilled to the end"
    position = None
    for chunk in chunks:
        start, end = chunk.numbers["start"], chunk.numbers["end"]
        if position is not None and start != position:
            return f"a chunk begins at {start}, and the one before it ended at {position}"
        position = None if chunk.numbers["final"] else end  # a retracted request begins anew, behind what the cache has of it
    rounds = {stage: [record.round for record in records if record.stage == stage] for stage in ("draft", "verify", "extend")}
    if any(numbers != list(range(len(rounds["draft"]))) for numbers in rounds.values()):
        return "a stage of a round was not recorded"
    stages = Counter(record.stage for record in records)
    in_graph = Counter(record.stage for record in records if record.numbers.get("in_graph"))
    due = {"target.extend": len(chunks), "draft.extend": len(chunks) * (layers or 1), "target.verify": len(rounds["draft"])}
    due["draft.decode"] = 0 if layers else _decodes(header.case, records, model)
    due["draft.extend_decode"] = (len(rounds["draft"]) - in_graph["extend"]) * (layers or 1)
    wrong = next((stage for stage, count in due.items() if stages[stage] != count), None)
    return f"{stages[wrong]} records of {wrong}, not {due[wrong]}" if wrong else ""


def _decodes(case: Case, records: Sequence[Record], model: Model) -> int:
    """Forwards of draft decode that these rounds must have shown: none of a round without drafts, nor of one in a graph."""
    drafted = (record.numbers for record in records if record.stage == "draft" and not record.numbers.get("undrafted"))
    rounds = (numbers for numbers in drafted if not numbers.get("in_graph"))
    return sum(max(numbers.get("steps", case.num_steps) - model.first_step, 0) for numbers in rounds)


def _due(trace: Trace, number: int, record: Record, model: Model) -> str:
    """Which tensor of a record is not as long as it must be, where the judge compares only as much of it as there is."""
    case, numbers, layers = trace.header.case, record.numbers, model.mtp_layers > 0
    due: dict[str, tuple[int, int]] = {}  # tensor -> dimension, and how long it is
    if "hidden_out" in record.tensors:
        due["hidden_out"] = (0, len(trace.array(number, "input_ids")))
    if model.chosen and record.stage in INNER and not is_dense(trace, number, model.chosen):
        due["chosen"] = (0, len(trace.array(number, "input_ids")))
    if record.numbers.get("undrafted"):
        return ""
    if record.stage == "draft" and model.memory and not layers:
        due["scratch_kv"] = (0, max(numbers.get("steps", case.num_steps) - model.first_step, 0) * case.topk)
    if case.topk > 1 and record.stage == "draft" and model.memory:
        holes = (case.topk - 1) * (numbers["seq_len"] % case.page_size)
        if holes or "hole_kv" in record.tensors:
            due["hole_kv"] = (0, holes)
        if trace.header.inner and not layers:
            total = count_candidates(case.topk, case.num_steps)
            due |= dict.fromkeys(("candidate_tokens", "candidate_scores"), (0, total))
        if numbers.get("in_graph") and not layers:
            due["consumed"] = (0, (case.num_steps - 1) * case.topk)
    if record.stage == "cached":
        due |= {name: (0, len(trace.array(number, "slots"))) for name in record.tensors if name.endswith("_kv")}
    if record.stage == "verify":
        if case.topk > 1 and model.states:
            due["path_hidden"] = (0, numbers.get("kept", numbers["accept_len"]))
        if case.sampling_of(record.request) is not None:
            due |= dict.fromkeys(("target_probabilities", "target_logits"), (0, numbers["accept_len"]))
            hashed = view_of_engine(trace.header.engine.name).hashes_places
            due["places" if hashed else "coins"] = (0, numbers.get("steps", case.verify_nodes - 1) + 1)
            if case.rejection_sampling:
                due["draft_probabilities"] = (0, numbers.get("steps", case.num_steps))
    skipped = numbers.get("skipped") and view_of_engine(trace.header.engine.name).skips
    if not skipped and (record.stage == "extend" or (record.stage == "prefill" and numbers["final"])):
        due |= dict.fromkeys(("proposal", "proposal_probabilities") if case.topk > 1 else ("proposal",), (0, case.topk))
    if model.keeping and record.stage in ("extend", "prefill"):
        due |= {"target_state": (0, model.keeping), "target_conv": (0, model.keeping), "state_slots": (0, 2)}
    if model.keeping and case.prefix_cache:
        part, slots = ("cached", "cached_ends") if record.stage == "cached" else ("tracked", "tracked")
        if record.stage in ("iteration", "flushed", "cached"):
            if slots not in record.tensors:
                return f"no {slots}"
            due |= dict.fromkeys((f"{part}_state", f"{part}_conv"), (0, len(trace.array(number, slots))))
    for layer, ratio in enumerate(model.ratios if record.stage in ("extend", "prefill") else ()):
        if ratio and f"compressor{layer}_state" not in record.tensors:
            return f"no compressor{layer}_state"
    if layers and record.stage in ("extend", "prefill"):
        due["proposal"] = (0, case.topk * case.num_steps)
        due.pop("proposal_probabilities", None)
    if record.stage == "finished" and not numbers["dropped"]:
        due |= {"sent": (1, 3)}
        if "verify_ct" in numbers and "histogram" not in record.tensors:
            return "no histogram"
        if "sent" in record.tensors and trace.array(number, "sent")[..., 0].sum() != len(trace.array(number, "tokens")):
            return "not every message"
    return next(_lacking(trace, number, due), "")


def _lacking(trace: Trace, number: int, due: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    for name, (dimension, length) in due.items():
        if name not in trace.header.records[number].tensors:
            yield f"no {name}"
        elif (rows := trace.array(number, name).shape[dimension]) != length:
            yield f"{rows} rows of {name}, not {length},"


def _request(trace: Trace, name: str, stages: Counter[tuple[str, str]], model: Model) -> str:
    case = trace.header.case
    own = [(number, record) for number, record in enumerate(trace.header.records) if record.request == name]
    chunks, rounds = stages[name, "prefill"], stages[name, "draft"]
    # a request that ends in a verify of spec v1 has no draft extend after it
    extends = rounds - sum(record.stage == "verify" and "kept" in record.numbers for _, record in own)
    due = {"finished": 1, "verify": rounds, "extend": extends}
    if case.prefix_cache:
        due["cached"] = int(chunks > 0)
    if trace.header.inner:
        due |= {"target.extend": chunks, "draft.extend": chunks, "target.verify": rounds, "draft.extend_decode": extends}
        layers = case.num_steps if model.mtp_layers else 0
        in_graph = Counter(record.stage for _, record in own if record.numbers.get("in_graph"))
        due["draft.decode"] = 0 if layers else _decodes(case, [record for _, record in own], model)
        due["draft.extend_decode"] -= in_graph["extend"]
        for stage in ("draft.extend", "draft.extend_decode"):
            due[stage] *= (layers or 1) * model.memory
    for stage, count in due.items():
        if stages[name, stage] != count:
            return f"{stages[name, stage]} records of {stage}, not {count}"
    aborted = any(record.stage == "finished" and record.numbers["aborted"] for _, record in own)
    if not chunks and not aborted:
        return "it was never prefilled"
    if _unread(trace, own):
        return "what the prefix cache had when its last result was looked at was not recorded"
    looks = model.windows and case.prefix_cache
    return (_looked_up(own) if looks else "") or _rows(trace, own, model)


def _unread(trace: Trace, own: list[tuple[int, Record]]) -> bool:
    """Whether the request ended as a retraction by an event was received, and nothing says what the prefix cache had then."""
    case = trace.header.case
    if not (trace.header.engine.overlap and case.prefix_cache):
        return False
    retracted = {event.at for event in case.events if event.kind == "retract"}
    ends = {record.iteration - 1 for _, record in own if record.stage == "finished" and not record.numbers["aborted"]}
    read = {record.iteration for record in trace.header.records if record.stage == "read"}
    return not (ends & retracted) <= read


def _looked_up(own: list[tuple[int, Record]]) -> str:
    """Before a chunk that does not go on from the one before it, what the prefix cache had when the request was looked up."""
    looked_up = {record.iteration for _, record in own if record.stage == "looked_up"}
    before = -1
    for _, record in own:
        if record.stage != "prefill" or "mixed" in record.numbers:
            continue
        if record.numbers["start"] != before and record.iteration not in looked_up:
            return f"its look-up in the prefix cache in iteration {record.iteration} was not recorded"
        before = record.numbers["end"]
    return ""


def _rows(trace: Trace, own: list[tuple[int, Record]], model: Model) -> str:
    """Chunks follow each other without a gap, and every committed row was looked at, in both pools."""
    ends: dict[int, int] = {}  # round of the prefill -> where its last chunk ended
    case = trace.header.case
    drafts, layers = model.drafts, case.num_steps
    seen: dict[str, set[int]] = {part: set() for part in ("target", *drafts[:layers])}
    for number, record in own:
        if record.stage not in ("prefill", "extend"):
            continue
        end = record.numbers["end" if record.stage == "prefill" else "seq_len"]
        if record.stage == "prefill":
            start, before = record.numbers["start"], ends.get(record.round)
            # with a prefix cache a retracted request may come back to a longer prefix than it left
            comes_back = before is not None and start > before and trace.header.case.prefix_cache
            first_of_attempt = before is None or record.attempt > 0 or start < before or comes_back
            if not first_of_attempt and start != before:
                return f"a chunk begins at {start}, and the one before it ended at {before}"
            ends[record.round] = end
        for part, rows in seen.items():
            rows.update(trace.integers(number, f"{part}_rows"))
            if len(rows) < end or not rows.issuperset(range(end)):
                return f"not every row of the {part} below {end} was recorded"
    return ""


# Which numbers a record must have. One that is absent is a tap that stopped, and never a reason to compare less.
#
# Called by the judge before it compares anything.

_POOL = ("total", "available", "evictable", "protected")
_OF_STAGE: dict[str, tuple[str, ...]] = {
    "iteration": (*_POOL, "live"),
    "flushed": (*_POOL, "live"),
    "prefill": ("start", "end", "final"),
    "draft": ("seq_len", "in_graph"),
    "verify": ("seq_len", "accept_len", "bonus", "new_seq_len"),
    "extend": ("seq_len", "in_graph"),
    "finished": ("aborted", "dropped"),
    "abort": ("launched", "read"),
    "fed": ("batch_size",),
    "copy": ("restore",),
}
# Absent of a request that was dropped from the queue, and of one for which nothing was sent, which output.tokens finds.
_OF_MESSAGE = (*COUNTS, "finish", "finish_matched", "finish_length")
_OF_TENSOR: dict[str, tuple[str, ...]] = {
    "window_free": tuple(f"window_{name}" for name in _POOL),
    "state_free": ("state_total", "state_given_up"),
}


def absent_number(trace: Trace) -> str:
    """What a record lacks, as a part of a sentence; empty if each has its numbers."""
    header = trace.header
    if not model_of(header).numbers:
        return ""
    host = header.case.engine.sglang.host_pages > 0
    work = dict[int, set[str]]()  # iteration -> numbers by which its batch names the requests that it worked on
    for record in header.records:
        if record.stage in ("prefill", "verify"):
            work.setdefault(record.iteration, set()).add(f"request.{record.request}")
    owners = set[str]()  # the same of all requests so far: each batch names them
    for at, record in enumerate(header.records):
        due = _numbers_of(record, host)
        sent = record.stage == "finished" and not record.numbers.get("dropped", 1) and "sent" in record.tensors
        if sent and len(trace.array(at, "sent")) > 0:
            due += _OF_MESSAGE
        if record.stage == "batch":
            owners |= record.numbers.keys() | work.get(record.iteration, set())
            due = sorted(owners)
        if name := next((name for name in due if name not in record.numbers), ""):
            return f"no {name} of a {record.stage} record"
    return ""


def _numbers_of(record: Record, host: bool) -> list[str]:
    stage, numbers = record.stage, record.numbers
    due = [
        *_OF_STAGE.get(stage, ()),
        *(name for tensor, names in _OF_TENSOR.items() if tensor in record.tensors for name in names),
    ]
    if stage == "prefill" and not numbers.get("final", 1):
        due.append("tokens")
    if stage == "session":
        due.append("opens" if record.request else "closes")
    if stage in ("iteration", "flushed") and host:
        due += ["copying", "host_total", "host_available"]
    return due


# What ran in a CUDA graph: no Python runs there, so no tap recorded what its forwards were given.
#
# A wrong input shows in the rows that it led to (draft.scratch_kv, draft.kv) and in what was proposed; the verdict says how
# many comparisons could not be made.

_INPUTS = ("draft.positions", "draft.hidden_in", "draft.slots")
INPUTS = ("draft.input_ids", *_INPUTS)
# Where a wrong input shows that a graph hides: in the rows that its forward wrote.
_SHOWS_INSTEAD = ("draft.scratch_kv", "draft.kv")


def shows_instead(broken: str, rule: str) -> bool:
    """Whether a bug that breaks `rule` may break this one, where a graph hides what `rule` looks at."""
    return rule in INPUTS and broken in _SHOWS_INSTEAD


def draft_decode_in_graph(trace: Trace, compare: Compare, consumed: _Consumed, number: int, round: Round) -> None:
    """Draft record `number`. consumed: what a step of a round must have consumed, as far as the trace shows it elsewhere.

    The tokens of a tree's frontiers are read from the memory of a graph that eagletwin captured, and not in a server, which
    captures its own; those of a chain are its proposals."""
    case, record = trace.header.case, trace.header.records[number]
    steps, seen = case.num_steps - 1, case.topk > 1 and "consumed" in record.tensors
    compare.not_seen(_INPUTS if seen else INPUTS, steps)
    if not seen:
        return
    recorded = trace.integers(number, "consumed")
    for step in range(1, steps + 1):
        ids = recorded[(step - 1) * case.topk : step * case.topk]
        tokens = consumed(round, step, ids)
        compare.integers(Place(record, "draft", step), "draft.input_ids", tokens, ids, "branch", 0)
