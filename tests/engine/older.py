"""What the tests of older releases share: a host of a release, and a case in which much happens."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import Source, here, resolve
from eagletwin.harness.engines.start import Zygote

from ..lab.serving.zygote import FrontEnd
from . import warm

PROMPT = (49, 53, 5, 33, 65, 62, 51, 38, 61, 45, 74, 27)
# In pages, with a shared prefix, a retraction, a pause and an abort; a chain that no chunk cuts.
BUSY = Case(
    name="busy",
    model="llama-eagle3",
    num_steps=3,
    page_size=4,
    requests=(
        Request(id="a", prompt=PROMPT, max_new_tokens=9),
        Request(id="b", prompt=(*PROMPT[:9], 7), max_new_tokens=6, arrive=4),
        Request(id="c", prompt=PROMPT[3:], max_new_tokens=9, arrive=4),
    ),
    events=(
        Event(at=5, kind="retract"),
        Event(at=7, kind="pause"),
        Event(at=9, kind="resume"),
        Event(at=10, kind="abort", request="c"),
    ),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True)),
)


@contextmanager
def host_of(release: str) -> Iterator[Host]:
    """Its zygote is kept for the next test that needs the release (warm.py). Skips the test if it is not in the cache."""
    host = Host(source=_cached(release))
    with warm.keeping():
        host.connection()
    try:
        yield host
    finally:
        with warm.keeping():
            host.close()


@contextmanager
def zygote_of(release: str) -> Iterator[Zygote]:
    """A process for servers of the release, which is started. Skips the test if the release is not in the cache."""
    with FrontEnd(_cached(release)) as zygote:
        zygote.start()
        yield zygote


def _cached(release: str) -> Source:
    if release not in here():
        pytest.skip(f"SGLang {release} is not in the cache: `eagletwin info releases fetch {release}`")
    return resolve(release)
