"""The benchmark's page: written from what was measured, part by part."""

from pathlib import Path
from subprocess import CompletedProcess

import msgspec
import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.errors import HarnessError, InputError

from .bench import searches
from .bench.record import RECORD, BenchRecord, Search, Speed, Stamp, read_record, write_record
from .bench.report import in_turn_lines, page
from .bench.searches import Hit, Searched, why_not
from .bench.speed import Share, Spread, StepTimes, spread

MONDAY, TUESDAY = (Stamp(f"2026-01-{day}", "a machine", "versions") for day in ("05", "06"))
ONE = Spread(1.0, 0.5, 2.0, 5)
STEP = StepTimes(Spread(0.01, 0.009, 0.02, 3), Spread(0.25, 0.2, 0.3, 3), Spread(25.0, 20.0, 30.0, 3))
SHARES = {1: Share(0.06, 0.006, 0.003)}
SPEED = Speed(MONDAY, {1: ONE, 3: ONE}, SHARES, {3: STEP}, ONE, ONE, ONE, {"topk": {1: ONE, 16: ONE}}, ONE)


def searched(entry: str, *seconds: float, seeds: int) -> Searched:
    return Searched(entry, "", seeds, tuple(Hit(3, taken, 20, 2.0, "num_steps 1", False) for taken in seconds))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = BenchRecord(speed=SPEED, searches={"25015": Search(MONDAY, 2, searched("25015", 1.0, seeds=1))})
    write_record(tmp_path / "docs", record)
    assert read_record(tmp_path / "docs") == record
    assert read_record(tmp_path) == BenchRecord()
    (tmp_path / RECORD).write_text("{")
    with pytest.raises(InputError, match="written over"):
        read_record(tmp_path)


def test_the_page_says_how_many_bugs_were_found_and_how_soon_and_no_size_of_what_was_not_shrunk() -> None:
    unshrunk = tuple(Hit(12, seconds, 0, 0.0, "", False) for seconds in (20.0, 30.0, 40.0))
    record = BenchRecord(
        searches={
            "25015": Search(MONDAY, 2, searched("25015", 1.0, 2.0, 9.0, seeds=3)),
            "26329": Search(MONDAY, 2, searched("26329", seeds=3)),
            "certain-node": Search(MONDAY, 2, Searched("certain-node", "", 4, unshrunk)),
            "small-tree": Search(MONDAY, 2, searched("small-tree", 15.0, seeds=1)),
        },
    )
    text = page(record)
    assert f"| certain-node | - | 3 of 4 | 12 (12-12) | {spread([20.0, 30.0, 40.0])} | - | - |  |" in text
    assert "Of 4 bugs 3 were found, 2 of them by every search." in text
    assert (
        "The median of their medians is 15.0 s. One search finds 2.0 in 15 s, 2.5 in 30 s, 2.8 in 60 s, 2.8 in 300 s:" in text
    )


def test_a_search_whose_process_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> CompletedProcess[bytes]:
        entry = command[-3]
        said = msgspec.json.encode(searched(entry, 1.0, seeds=1))
        return CompletedProcess(command, int(entry == "26329"), said, b"no weights")

    monkeypatch.setattr(searches.subprocess, "run", run)
    seen = searches.search_all([LEDGER[name] for name in ("26329", "25015", "small-tree")], 1, 1, 2)
    assert [next(seen).entry, next(seen).entry] == ["25015", "small-tree"]
    with pytest.raises(HarnessError, match="26329 ended with exit code 1: no weights"):
        next(seen)


def test_a_rate_is_told_as_a_share_of_the_one_beside_it() -> None:
    lines = in_turn_lines("slow", "quick", Share(0.12, 0.01, 0.02), Share(0.06, 0.01, 0.02))
    assert [line.split(":")[0] for line in lines[:2]] == ["quick", "slow"]
    assert lines[1].endswith("120.0 ms a case; engine 90.0, trace 10.0, judge 20.0")
    assert lines[2] == "0.50 of the rate of quick"


def test_each_part_of_the_page_has_its_own_day_and_what_is_missing_is_named() -> None:
    record = BenchRecord(
        speed=SPEED,
        searches={
            "25015": Search(MONDAY, 2, searched("25015", 1.0, 2.0, 9.0, seeds=4)),
            "26329": Search(TUESDAY, 8, searched("26329", seeds=3), 2),
        },
    )
    text = page(record)
    assert "Measured on 2026-01-05: a machine; versions. 2 searches at a time, on a core each. (25015)" in text
    assert "Measured on 2026-01-06: a machine; versions. 8 searches at a time, on 2 cores each. (26329)" in text
    assert f"| 25015 | - | 3 of 4 | 3 (3-3) | {spread([1.0, 2.0, 9.0])} |" in text
    assert "| 26329 | - | 0 of 3 | - | - |" in text
    absent = text.partition("Not searched for yet")[2]
    wanted = {name for name, entry in LEDGER.items() if not why_not(entry)}
    assert all(f" {name}," in absent or f" {name}." in absent for name in wanted - {*record.searches})
    assert [name for name in LEDGER if f"Never searched for: {name} is not reached" in text] == [
        "overlap-context-end",
        "multi-layer-topk-parents",
        "grammar-stride",
        "mixed-grammar",
        "retracted-logprobs",
        "retracted-stream",
        "context-end-stores",
        "context-end-reads",
        "standalone-states",
        "prefill-graph",
        "draft-plan",
        "draft-plan-flashmla",
        "pipeline-tail",
        "pipeline-pause",
        "pipeline-hidden",
        "pipeline-mixed",
        "pipeline-empty",
        "pipeline-zeros",
        "tree-slots",
        "adaptive-bonus",
        "adaptive-hidden",
    ]
    assert "25015" not in absent
    assert "topk 1: trace 6.0 ms, judge 3.0 ms | 15.0% |" in text
    assert "topk 3: 10 (9-20) ms, and 250 (200-300) ms in Triton's interpreter | 25 (20-30) times faster |" in text
    assert "Not measured yet" in page(BenchRecord())
