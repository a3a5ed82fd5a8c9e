"""What a trace shows to have happened: which features of exercised.FEATURES the case really exercised."""

import itertools

from eagletwin.harness.exercised import FEATURES
from eagletwin.harness.models.recipes import RECIPES
from eagletwin.harness.trace import Record, Trace

from .story import Round, Story
from .trees import parents_of


def exercised(trace: Trace, stories: dict[str, Story]) -> tuple[str, ...]:
    """Names of the features, in the order of FEATURES."""
    case, records = trace.header.case, trace.header.records
    by_stage: dict[str, list[Record]] = {}
    for record in records:
        by_stage.setdefault(record.stage, []).append(record)
    prefills, verified = by_stage.get("prefill", []), by_stage.get("verify", [])
    chunks = [record for record in prefills if not record.numbers["final"]]
    accepted = [record.numbers["accept_len"] for record in verified]
    batches: dict[int, set[str]] = {}
    for record in verified:
        batches.setdefault(record.iteration, set()).add(record.request)
    in_order = [batches[iteration] for iteration in sorted(batches)]
    neighbours = list(itertools.pairwise(in_order))

    def tail_differs(record: Record) -> bool:
        story, end = stories[record.request], record.numbers["end"]
        return story.target is not None and int(story.target.logits[end - 1].argmax()) != story.tokens[end]

    def last_chunk(record: Record) -> bool:
        return bool(record.numbers["final"]) and _continues(record, prefills)

    together: dict[int, list[Record]] = {}  # prefill batch -> its records
    for record in prefills:
        together.setdefault(record.forward, []).append(record)
    hits = [
        record
        for record in prefills
        if record.numbers["start"] > 0 and record.round == 0 and record.attempt == 0 and not _continues(record, prefills)
    ]
    prompts = {request.id: request.prompt for request in case.requests}
    lengths = {request.id: request.max_new_tokens for request in case.requests}

    def goes_on(record: Record) -> bool:
        """Whether another prompt shares more with this one than was reused."""
        start, prompt = record.numbers["start"], prompts[record.request]
        return start + 1 < len(prompt) and any(
            other[: start + 1] == prompt[: start + 1] for name, other in prompts.items() if name != record.request
        )

    rounds = [round for story in stories.values() for round in story.rounds]

    def changes_parent(round: Round) -> bool:
        """At step j, branch b: whether the candidate expanded there was proposed by another branch."""
        later = enumerate(round.expanded[case.topk :])
        return any((candidate // case.topk - 1) % case.topk != at % case.topk for at, candidate in later)

    layers = RECIPES[case.model].mtp_layers > 0

    def looks_past(number: int, record: Record) -> bool:
        """Whether the last layer's window of a chunk in between ends behind the prompt."""
        if record.stage != "prefill" or record.numbers["final"]:
            return False
        return record.numbers["end"] + case.num_steps - 1 > stories[record.request].known[number]

    def refused(number: int, record: Record) -> bool:
        """Whether a child of the last accepted node had a chance."""
        round = stories[record.request].rounds[record.round]
        parents, last = parents_of(case, round), round.path[-1] if round.path else 0
        tokens = [round.drafted[node - 1] for node, parent in enumerate(parents or ()) if parent == last]
        chances = trace.tensor(number, "target_probabilities")[-1]
        return case.sampled(record.request) is not None and any(float(chances[token]) > 0 for token in tokens)

    aborted = {record.request for record in by_stage.get("finished", []) if record.numbers["aborted"]}
    unfinished = {record.request for record in chunks} - {record.request for record in prefills if record.numbers["final"]}
    happened = {
        "chunked_prefill": bool(chunks),
        "chunk_tail_differs": any(tail_differs(record) for record in chunks),
        "draft_decode": case.num_steps >= 2 and "draft" in by_stage and not layers,
        # layer k has consumed d[1..k]: of all layers, every draft but the last
        "look_ahead_rejected": layers and any(len(round.path) < case.num_steps for round in rounds if round.path),
        "look_ahead_past_prompt": layers and any(looks_past(number, record) for number, record in enumerate(records)),
        "rejection": any(length <= case.num_steps for length in accepted),
        "accept_all": any(length == case.num_steps + 1 for length in accepted),
        "accept_some": any(1 < length <= case.num_steps for length in accepted),
        "tree": case.topk > 1 and bool(rounds),
        "path_not_in_front": any(round.path != list(range(len(round.path))) for round in rounds),
        "branch_changes_parent": any(changes_parent(round) for round in rounds),
        "branch_holes": any(round.committed % case.page_size for round in rounds) and case.topk > 1,
        "batch": any(len(batch) > 1 for batch in in_order),
        "batch_grows": any(before & after and after - before for before, after in neighbours),
        "batch_shrinks": any(before & after and before - after for before, after in neighbours),
        "page_crossed_in_draft": any(
            record.numbers["seq_len"] // case.page_size != (record.numbers["seq_len"] + case.num_steps - 1) // case.page_size
            for record in verified
        )
        and case.page_size > 1,
        "prompt_ends_in_page": any(record.numbers["final"] and record.numbers["end"] % case.page_size for record in prefills),
        "retraction": any(record.round > 0 or record.attempt > 0 for record in prefills),
        "retraction_in_decode": any(record.round > 0 for record in prefills),
        "chunk_ends_in_output": any(record.numbers["end"] >= len(prompts[record.request]) for record in chunks),
        "radix_hit": bool(hits),
        "radix_hit_in_page": case.page_size > 1 and any(goes_on(record) for record in hits),
        "radix_hit_across_pages": case.page_size > 1 and any(record.numbers["start"] > case.page_size for record in hits),
        "shared_chunk": any(
            any(record.numbers["final"] for record in batch) and any(not record.numbers["final"] for record in batch)
            for batch in together.values()
        ),
        "one_token_tail": any(
            last_chunk(record) and record.numbers["end"] - record.numbers["start"] == 1 for record in prefills
        ),
        "early_stop": any(
            not record.numbers["aborted"] and len(trace.tensor(number, "tokens")) < lengths[record.request]
            for number, record in enumerate(records)
            if record.stage == "finished"
        ),
        "sampled_verify": any("coins" in record.tensors and case.sampled(record.request) for record in verified),
        "coin_refuses": any(
            refused(number, record) for number, record in enumerate(records) if "target_probabilities" in record.tensors
        ),
        "mixed_sampling": any({case.sampled(name) is None for name in batch} == {True, False} for batch in in_order),
        "abort_in_prefill": bool(aborted & unfinished),
        "abort_in_decode": bool(aborted & {record.request for record in verified}),
    }
    return tuple(name for name in FEATURES if happened[name])


def _continues(record: Record, prefills: list[Record]) -> bool:
    """Whether a chunk goes on where an earlier chunk of the same request ended."""
    return any(
        other.request == record.request and other.round == record.round and other.numbers["end"] == record.numbers["start"]
        for other in prefills
    )
