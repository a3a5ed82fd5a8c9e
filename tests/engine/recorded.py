"""What a recording of a server would hold of a trace of an engine: one request, and integers alone."""

from collections.abc import Iterator

from msgspec.structs import replace

from eagletwin.harness.core.records import Ending, ServedModel
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.judge.rules.sessions import with_full_prompts

_NO_REQUEST = ("batch",)  # stages that a recording has of its batch
_NOT_RECORDED = ("cached", "session")
_ABOUT_ROWS = ("_rows", "_kv")


def integers_of(trace: Trace) -> Iterator[Trace]:
    """A recording for each request that was prefilled to its end. One of a session comes with all that was said in it."""
    trace = with_full_prompts(trace)
    header = trace.header
    recipe = RECIPES[header.case.model]
    served = ServedModel(
        vocab_size=recipe.target.vocab_size,
        mtp_layers=header.case.num_steps if recipe.mtp_layers else 0,
        states=recipe.reads_states,
    )
    proposes = model_pair(recipe.name).proposes.numpy()  # a recording has the target's ids
    for request in header.case.requests:
        records, tensors = [], {}
        for number, record in enumerate(header.records):
            if record.request != request.id and record.stage not in _NO_REQUEST:
                continue
            if record.stage in _NOT_RECORDED:
                continue
            names = [name for name in record.tensors if not name.endswith(_ABOUT_ROWS)]
            names = [name for name in names if trace.array(number, name).dtype.kind != "f"]
            for name in names:
                array = trace.array(number, name)
                tensors[f"{len(records)}.{name}"] = proposes[array] if name == "proposal" else array
            records.append(replace(record, tensors=tuple(names)))
        if any(record.stage == "prefill" and record.numbers["final"] for record in records):
            case = replace(header.case, requests=(replace(request, session=""),), events=(), exercises=())
            ending = header.ending if header.ending.kind == "finished" else Ending(kind="stopped", detail="as the run did")
            yield Trace(
                replace(
                    header,
                    case=case,
                    records=tuple(records),
                    served=served,
                    ending=ending,
                    weights="",
                    engine=replace(header.engine, tp=1),
                ),
                tensors,
            )
