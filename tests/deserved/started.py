"""What a server says of how it was started, for tests that ask no server."""

from eagletwin.harness.deserved.server import Started

STARTED = Started(
    version="0.5.23",
    algorithm="EAGLE",
    num_steps=3,
    topk=1,
    num_draft_tokens=4,
    chunk=0,
    page_size=1,
    dtype="float32",
    target="",
    draft="",
    overlap=True,
    graphs=True,
)
