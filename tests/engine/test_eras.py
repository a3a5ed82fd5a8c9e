"""One release of each generation of SGLang, if it is in the cache: its traces hold all that the installed one's hold.

`eagletwin info releases fetch` brings the releases. docs/explanation/eras.md says what differs between them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import EngineSettings, SGLangSettings
from eagletwin.harness.core.run_spec import Limits
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import long
from .older import BUSY, host_of

GENERATIONS = ("0.5.13.post1", "0.5.15.post1", "0.5.17", "0.5.20")
TREE = replace(BUSY, topk=2, num_draft_tokens=5, chunked_prefill_size=8)


@pytest.fixture(scope="module", params=GENERATIONS)
def older(request: pytest.FixtureRequest) -> Iterator[Host]:
    with host_of(request.param) as host:
        yield host


def held(trace: Trace) -> set[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """What the records of each stage hold."""
    return {(record.stage, tuple(sorted(record.tensors)), tuple(sorted(record.numbers))) for record in trace.header.records}


def test_an_older_release_is_seen_as_fully_as_the_installed_one(host: Host, older: Host, tmp_path: Path) -> None:
    traces = []
    for name, of in (("installed", host), ("older", older)):
        (tmp_path / name).mkdir()
        traces.append(of.engine(TREE).run(TREE, tmp_path / name, Limits()))
    verdicts = [judge(trace) for trace in traces]
    assert [verdict.status for verdict in verdicts] == ["equal", "equal"], verdicts
    assert held(traces[0]) == held(traces[1])
    assert verdicts[0].exercised == verdicts[1].exercised
    assert {"tree", "radix_hit", "retraction", "chunked_prefill"} <= set(verdicts[0].exercised)


@pytest.mark.parametrize("entry", ["26329", *long("25015", "26997-kv")])
def test_what_was_fixed_before_is_fixed_in_an_older_release(older: Host, entry: str, tmp_path: Path) -> None:
    case = LEDGER[entry].case
    verdict = judge(older.engine(case).run(case, tmp_path, Limits()))
    assert verdict.status == "equal", verdict


def test_what_is_live_shows_in_an_older_release(older: Host, tmp_path: Path) -> None:
    case = LEDGER["multi-layer-chunk-tail-2"].case
    verdict = judge(older.engine(case).run(case, tmp_path, Limits()))
    # 0.5.20 does not get that far: ledger entry multi-layer-pp-proxy
    expected = ("unknown", "engine.crash") if older.version == "0.5.20" else ("diverged", "draft.input_ids")
    assert (verdict.status, verdict.rule) == expected


@pytest.mark.long
def test_deterministic_inference_runs(older: Host, tmp_path: Path) -> None:
    case = replace(BUSY, events=(), engine=EngineSettings(sglang=SGLangSettings(deterministic=True)))
    verdict = judge(older.engine(case).run(case, tmp_path, Limits()))
    assert verdict.status == "equal", verdict
