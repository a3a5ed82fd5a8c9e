"""One mutant of the real worker after the other: killed by a rule, by a crash, or not run at all."""

import pytest

from eagletwin.harness.core.case import Case
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import init_file

from ..lab.mutants.corpus import Known
from ..lab.mutants.draw import Mutant, mutants_of
from ..lab.mutants.hunt import hunt

FILE = "sglang/srt/speculative/eagle_utils.py"


def mutant(host: Host, function: str, before: str, after: str) -> Mutant:
    init = init_file(host.source)
    assert init is not None
    drawn = mutants_of((init.parents[1] / FILE).read_text(), FILE.removesuffix(".py").replace("/", "."), FILE)
    return next(one for one in drawn if one.function == function and (one.before, one.after) == (before, after))


@pytest.mark.parametrize(
    ("planted", "outcome", "by"),
    [
        (
            ("_eagle_prefill_tail_tokens", "next_prompt_token is not None", "next_prompt_token is None"),
            "rule",
            "draft.input_ids",
        ),
        (("organize_draft_results", "num_draft_token - 1", "num_draft_token + 1"), "not run", ""),
    ],
)
def test_a_mutant_is_killed_or_not_run(
    host: Host, busy_case: Case, planted: tuple[str, str, str], outcome: str, by: str
) -> None:
    one = mutant(host, *planted)
    known = Known(block=0, case=busy_case, mended=(), view="slot_layout", ran={FILE: (one.block,)})
    found = hunt(host, one, [known], most=1, seconds=60.0)
    assert (found.outcome, found.by) == (outcome, by)
    assert hunt(host, one, [Known(0, busy_case, (), "slot_layout", {})], 1, 60.0).outcome == "not run"
