"""Pages and traces made by hand, for tests that need no engine."""

import torch
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Event, Request
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.trace import Recorder, Trace, When, new_header
from eagletwin.harness.core.verdict import Divergence, Verdict
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.page.document import Document, DocumentSection, Node, Table, TableCell, TableRow, TreePicture
from eagletwin.harness.page.timeline import timeline_of

HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script>'\"&\u2028"
ENGINE = EngineInfo(name="sglang", version="0.5.23", device="cpu", kernels="", torch="", triton="")


def recorded(rounds: int, *, requests: tuple[str, ...] = ("a",), name: str = "planted", engine: EngineInfo = ENGINE) -> Trace:
    """A prefill, rounds of three drafts of which some are accepted, and an end, for each request: one round an iteration."""
    recorder = Recorder()
    for request in requests:
        tensors = {"next_token": torch.tensor([5])}
        recorder.add(request, 0, "prefill", numbers={"start": 0, "end": 4, "final": 1}, tensors=tensors, when=When(0, 0))
        committed = 4
        for round in range(rounds):
            when, length = When(round + 1, round + 1), 1 + round % 4
            drafted = torch.tensor([7, 10 + round % 50, 20, 30])
            recorder.add(request, round, "draft", numbers={"seq_len": committed}, tensors={"tokens": drafted}, when=when)
            numbers = {"accept_len": length, "seq_len": committed, "new_seq_len": committed + length, "bonus": 9}
            path = {"accept_index": torch.arange(length), "predicted": torch.arange(length)}
            recorder.add(request, round, "verify", numbers=numbers, tensors=path, when=when)
            committed += length
        ended = {"tokens": torch.arange(committed - 4)}
        recorder.add(request, rounds, "finished", numbers={"aborted": 0}, tensors=ended, when=When(rounds + 1, rounds + 1))
    asked = tuple(Request(id=request, prompt=(1, 2, 3, 4), max_new_tokens=512) for request in requests)
    events = (Event(at=1, kind="abort", request=requests[0]), Event(at=2, kind="retract"))
    case = Case(name="planted", model="llama-tiny", num_steps=3, requests=asked, events=events)
    header = new_header(case, model_pair("llama-tiny").digest, engine, Ending(kind="finished"), recorder.records)
    return Trace(replace(header, case=replace(case, name=name)), recorder.tensors)


def wrong(request: str = "a", iteration: int = 2, text: str = "") -> Divergence:
    return Divergence(
        rule="draft.input_ids",
        request=request,
        round=iteration - 1,
        stage="draft.decode",
        step=1,
        iteration=iteration,
        index=f"row 4{text}",
        expected=f"3{text}",
        actual=f"89{text}",
        why=text,
    )


DIVERGED = Verdict(status="diverged", rule="draft.input_ids", first=wrong(), checked={"draft.input_ids": 3})


def tree(title: str, *, differs: bool) -> TreePicture:
    nodes = (
        Node(x=60, y=30, label="0", token="25", accepted=True),
        Node(x=60, y=110, label="1", token="80", wrong=differs, note="9"),
    )
    return TreePicture(
        title=title, width=120, height=160, nodes=nodes, edges=((60, 30, 60, 110),), words=f"{title}: node 0, node 1"
    )


def page(text: str = "") -> Document:
    """A page with everything that there is on one; text: put into each of its texts."""
    cells = (TableCell(f"row 4{text}"), TableCell(f"3{text}"), TableCell(f"89{text}", "wrong"))
    table = Table(
        caption=f"Rows{text}", header=("", f"expected{text}", "actual"), rows=(TableRow(cells, "wrong"),), note=text or "one"
    )
    tagged = tuple(
        TableRow((TableCell(f"entry-{n}{text}"), TableCell("red", "wrong")), tags=("live" if n % 2 else "fixed",))
        for n in range(10)
    )
    filtered = Table(
        caption="Entries", header=("entry", "cell"), rows=tagged, filters=(("State", ("live", "fixed")),), searched=True
    )
    trace = recorded(3, requests=("a", "b"))
    if text:
        requests = tuple(replace(one, id=f"{one.id}{text}") for one in trace.header.case.requests)
        records = tuple(replace(one, request=f"{one.request}{text}") for one in trace.header.records)
        case = replace(trace.header.case, requests=requests, events=())
        trace = Trace(replace(trace.header, case=case, records=records), trace.tensors)
    return Document(
        title=f"planted{text}",
        status="diverged",
        headline=f"draft.input_ids{text}",
        facts=(("SGLang", f"0.5.23{text}"), ("changed", f"patch{text}")),
        fields=(("index", f"row 4{text}"), ("expected", f"3{text}"), ("actual", f"89{text}")),
        sentence=f"must hold{text}",
        why=f"why{text}",
        reason=text,
        timeline=timeline_of(trace, [wrong(f"a{text}", 2, text)]),
        trees=(tree("Expected", differs=False), tree("Actual", differs=True)),
        tables=(table,),
        sections=(DocumentSection(heading=f"More{text}", lines=(f"line{text}",), text=f"text{text}", tables=(filtered,)),),
        argument=f"argument{text}",
        again=(f"eagletwin check x{text}",),
        files=(f"case.json{text}",),
    )
