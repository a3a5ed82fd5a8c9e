"""Generated cases on the unmodified release: nothing is found, few ties, and they reach what they should.

`make test` runs a few dozen; `make sweep` runs 1,000 (docs/records/detection.md).
"""

from pathlib import Path

import pytest

from eagletwin.harness.check.trials import Trials
from eagletwin.harness.commands.fuzz.options import Plan
from eagletwin.harness.commands.fuzz.search import Fuzz
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families.valid import read_case
from eagletwin.harness.judge.judge import judge

CASES = Path(__file__).parent / "cases"

# Feature -> at least this share of the cases that exercise it, over the searches below.
ENOUGH = {
    "chunked_prefill": 0.3,
    "chunk_tail_differs": 0.3,
    "shared_chunk": 0.05,
    "one_token_tail": 0.05,
    "draft_decode": 0.3,
    "rejection": 0.4,
    "accept_all": 0.35,
    "accept_some": 0.25,
    "look_ahead_rejected": 0.05,
    "tree": 0.3,
    "path_not_in_front": 0.15,
    "branch_changes_parent": 0.1,
    "branch_holes": 0.1,
    "batch": 0.3,
    "batch_grows": 0.08,
    "batch_shrinks": 0.15,
    "early_stop": 0.05,
    "prompt_ends_in_page": 0.1,
    "page_crossed_in_draft": 0.1,
    "radix_hit": 0.08,
    "radix_hit_in_page": 0.01,
    "retraction": 0.08,
    "retraction_in_decode": 0.03,
    "abort_in_prefill": 0.01,
    "abort_in_decode": 0.04,
    "sampled_verify": 0.15,
    "coin_refuses": 0.05,
    "mixed_sampling": 0.03,
}


def test_nothing_is_found_in_the_unmodified_release(host: Host, tmp_path: Path) -> None:
    search = Fuzz(Trials(host), tmp_path, Plan(seed=6, seconds=1e9, max_cases=10, shrink_seconds=0.0, command=""))
    assert [(finding.signature, finding.outcome.report) for finding in search.search()] == []
    assert search.tally.cases == search.tally.statuses["equal"] + search.tally.statuses["known"] + search.tally.undecided == 10
    assert search.tally.undecided <= 1
    assert search.tally.statuses["equal"] >= 6


@pytest.mark.long
def test_nothing_is_found_in_the_unmodified_release_and_much_is_reached(host: Host, tmp_path: Path) -> None:
    plan = Plan(seed=5, seconds=1e9, max_cases=100, shrink_seconds=0.0, command="")
    search = Fuzz(Trials(host), tmp_path, plan)
    assert [(finding.signature, finding.outcome.report) for finding in search.search()] == []
    tally = search.tally
    assert tally.cases == tally.statuses["equal"] + tally.statuses["known"] + tally.undecided == 100
    assert tally.undecided <= 2  # sampling: where top_k and top_p cut
    assert sum(bug.mended > 0 for bug in tally.known.values()) >= 3
    assert not search.unstarted
    assert tally.ties < 0.02 * tally.choices  # a tree ranks tokens of small probability, which lie close to each other
    assert {name: tally.exercised[name] for name, share in ENOUGH.items() if tally.exercised[name] < share * tally.cases} == {}
    # every accept length 1..num_steps+1, for every num_steps that more than a handful of cases had
    often = {width for length, cases in tally.accept_lens.items() if cases > 10 for width in [int(length.split()[-1])]}
    assert len(often) >= 3
    assert {f"{length} of {width}" for width in often for length in range(1, width + 1)} <= set(tally.accept_lens)


# Cases on which the judge once cried wolf: another request's prefix was cached first, so SGLang gave a request's duplicate
# slots away between two batches; the scheduler stood still between two chunks, whose state it hands over when it goes on.
@pytest.mark.parametrize("name", sorted(path.stem for path in CASES.glob("*.json")))
def test_a_case_that_once_raised_a_false_alarm_is_equal(host: Host, tmp_path: Path, name: str) -> None:
    case = read_case(CASES / f"{name}.json")
    assert judge(host.engine(case).run(case, tmp_path)).status == "equal"
