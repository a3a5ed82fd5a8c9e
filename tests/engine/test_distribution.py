"""Counts of sampled tokens, from the real worker: one case's worth, which any fault that is not small must already show in.

docs/records/detection.md has the counts that say something about small ones.
"""

from pathlib import Path

import pytest

from eagletwin.harness.core.mode import CPU

from ..lab.draws.campaign import Portion, share
from ..lab.draws.distribution import PROMPTS, TOGETHER, WAYS, findings


@pytest.mark.long
def test_the_worker_emits_what_the_target_may(tmp_path: Path) -> None:
    """Rejection sampling, in every way: three tokens of 64 requests."""
    tally = share(Portion(setting="rejection", mode=CPU, number=0, step=1, seconds=0), tmp_path)
    assert tally.requests == TOGETHER
    assert {key: counts.total() for key, counts in tally.joint.items()} == {
        (prompt, way): TOGETHER // len(PROMPTS) // len(WAYS) for prompt in range(len(PROMPTS)) for way in range(len(WAYS))
    }
    assert len({emitted for counts in tally.joint.values() for emitted in counts}) > 20, "tokens are drawn"
    assert all(finding.agreement.chance > 1e-9 for finding in findings(tally))
    assert tally.impossible == []
