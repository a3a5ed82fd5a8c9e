"""The counts of sampled tokens: right ones agree, ones that are off by some percent do not, and how often either goes wrong."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from eagletwin.reference.sampling import target_distribution

from .draws.distribution import (
    LEAST,
    LONG,
    PROMPTS,
    SETTINGS,
    TOGETHER,
    WAYS,
    Agreement,
    DrawTally,
    Drifting,
    as_one,
    chances,
    count_joint,
    count_long,
    findings,
    joint_case,
    joint_chances,
    long_case,
    pearson,
    pooled,
)

SETTING = SETTINGS["chain"]


def multinomial(rows: Tensor, samples: int, seed: int) -> Tensor:
    """Counts [trials, cells]."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.multinomial(rows, samples, replacement=True, generator=generator)
    return torch.stack([torch.bincount(row, minlength=rows.shape[1]) for row in cells])


def test_chances_are_those_of_the_chi_square_distribution() -> None:
    """Table values: 1 % and 0.1 %."""
    for freedom, one, tenth in ((1, 6.635, 10.828), (5, 15.086, 20.515), (30, 50.892, 59.703)):
        assert Agreement(0, one, freedom).chance == pytest.approx(0.01, rel=1e-3)
        assert Agreement(0, tenth, freedom).chance == pytest.approx(0.001, rel=1e-3)
    assert Agreement(0, 0.0, 0).chance == 1


def test_small_cells_are_put_together() -> None:
    counts, expected = pooled(torch.arange(6.0), torch.tensor([100.0, 1.0, 2.0, 60.0, 3.0, 50.0]))
    assert sorted(expected.tolist()) == [56.0, 60.0, 100.0]
    assert sorted(counts.tolist()) == [0.0, 3.0, 12.0]
    assert pooled(torch.ones(3), torch.full((3,), 10.0))[1].tolist() == [30.0], "too little for two cells"
    assert float(pooled(torch.ones(50), torch.rand(50) * 60)[1].min()) >= LEAST


def test_false_alarms_are_as_rare_as_stated() -> None:
    """4,000 right sets of counts with the least expectation that is allowed; one in a hundred, a thousand, ten thousand."""
    row = torch.tensor([LEAST, LEAST, 2 * LEAST, 5 * LEAST, 10 * LEAST], dtype=torch.float64)
    samples = int(row.sum())
    counts = multinomial((row / samples).expand(4_000, -1), samples, 1)
    found = torch.tensor([pearson(one, row / samples).chance for one in counts])
    for level, most in ((0.01, 65), (0.001, 12), (0.0001, 4)):  # 40, 4, 0.4 and four standard deviations or so
        assert int((found < level).sum()) <= most


def test_draws_of_changing_distributions_have_their_own_variance() -> None:
    """Pearson's statistic would be too small for these; theirs has the mean that it must have."""
    generator, found = torch.Generator().manual_seed(2), []
    for _ in range(300):
        rows = (torch.randn(600, 4, generator=generator, dtype=torch.float64) * 3).softmax(-1)
        drifting = Drifting(4)
        drifting.add(torch.multinomial(rows, 1, generator=generator)[:, 0].tolist(), rows)
        found.append(drifting.agreement())
    assert {one.freedom for one in found} == {3}
    mean = sum(one.statistic for one in found) / len(found)
    assert 2.4 < mean < 3.6  # 3, with a standard deviation of 0.14
    assert sum(one.chance < 0.01 for one in found) <= 10


def emit(number: int, *, warmer: float = 1.0, depth: int = 3) -> list[list[int]]:
    """What a right worker, or one whose temperature is off, emits for a joint case: drawn from the reference."""
    generator = torch.Generator().manual_seed(number)
    requests = joint_case(SETTING, number).requests
    emitted: list[list[int]] = [[] for _ in requests]
    for _ in range(depth):
        for way, sampling in enumerate(WAYS):
            mine = [n for n in range(TOGETHER) if n // len(PROMPTS) % len(WAYS) == way]
            logits = chances([[*requests[n].prompt, *emitted[n]] for n in mine], type(sampling)()).log()
            ends = torch.tensor([len(requests[n].prompt) + len(emitted[n]) for n in mine]).cumsum(0) - 1
            top_k = sampling.top_k or logits.shape[-1]
            rows = target_distribution(logits[ends], sampling.temperature * warmer, top_k, sampling.top_p)
            for n, token in zip(mine, torch.multinomial(rows, 1, generator=generator)[:, 0].tolist(), strict=True):
                emitted[n].append(token)
    return emitted


def tallied(cases: int, warmer: float = 1.0) -> DrawTally:
    tally = DrawTally()
    for number in range(cases):
        count_joint(tally, emit(number, warmer=warmer))
    return tally


@pytest.mark.long
@pytest.mark.slow
def test_right_tokens_agree_and_others_do_not() -> None:
    """A temperature that is a fifth off shows in 60 cases; docs/records/detection.md has what the worker's own show."""
    right, wrong = findings(tallied(60)), findings(tallied(60, warmer=1.2))
    assert min(finding.agreement.chance for finding in right) > 1e-3
    assert min(finding.agreement.chance for finding in wrong) < 1e-7
    assert {finding.what for finding in right} >= {"joint, all", "joint, prompt 1, temperature 2.0, top_k 5"}


def test_sequences_have_their_exact_chances() -> None:
    for way in (WAYS[1], WAYS[2]):
        exact = joint_chances(PROMPTS[0], way, 2)
        assert sum(exact.values()) == pytest.approx(1, abs=1e-12)
        first = chances([list(PROMPTS[0])], way)[-1]
        after = chances([[*PROMPTS[0], int(first.argmax())]], way)[-1]
        best = int(first.argmax()), int(after.argmax())
        assert exact[best] == pytest.approx(float(first.max() * after.max()), rel=1e-12)


def test_long_counts_take_every_token_but_the_first() -> None:
    case, tally = long_case(SETTING, 3), DrawTally()
    greedy = []
    for request in case.requests[:8]:
        tokens = list(request.prompt)
        for _ in range(LONG):
            tokens.append(int(chances([tokens], WAYS[0])[-1].argmax()))
        greedy.append(tokens[len(request.prompt) :])
    some = type(case)(**{name: getattr(case, name) for name in case.__struct_fields__} | {"requests": case.requests[:8]})
    count_long(tally, some, greedy)
    assert {way: drifting.samples for way, drifting in tally.long.items()} == dict.fromkeys(range(4), 2 * (LONG - 1))
    assert all(float(drifting.excess[0]) > 0 for drifting in tally.long.values()), "always the best: too often"
    assert all(abs(float(drifting.excess.sum())) < 1e-9 for drifting in tally.long.values())


def test_a_token_without_any_chance_is_reported() -> None:
    tally = tallied(1)
    counts = tally.joint[0, 1]  # top_k 5
    never = next(token for token in range(96) if (token,) not in joint_chances(PROMPTS[0], WAYS[1], 1))
    counts[(never, 0, 0)] += 1
    findings(tally)
    assert len(tally.impossible) == 1
    assert f"({never}, 0, 0)" in tally.impossible[0]


def test_counts_of_two_engines_add_up() -> None:
    one, two, both = tallied(1), DrawTally(), tallied(2)
    count_joint(two, emit(1))
    one.merge(two)
    assert one.joint == both.joint
    assert sum(Counter[int](map(len, both.joint)).values()) == len(PROMPTS) * len(WAYS)


def test_small_faults_add_up() -> None:
    parts = [Agreement(100, 16.0, 5)] * 8
    assert parts[0].chance > 1e-3
    assert as_one(parts).chance < 1e-7


def test_counts_come_back_as_they_were_written() -> None:
    tally = tallied(1)
    tally.requests, tally.impossible = TOGETHER, ["one"]
    case = long_case(SETTING, 1)
    few = type(case)(**{name: getattr(case, name) for name in case.__struct_fields__} | {"requests": case.requests[:4]})
    count_long(tally, few, [[1] * LONG] * 4)
    back = DrawTally.read(tally.plain())
    assert (back.joint, back.requests, back.impossible) == (tally.joint, tally.requests, tally.impossible)
    assert [finding.agreement for finding in findings(back)] == [finding.agreement for finding in findings(tally)]
