"""The choice of draft steps, by hand."""

from eagletwin.reference.adaptive import Knobs, Policy, Tier

AT_ONCE = Knobs(alpha=1.0, interval=1, warmup=0)


def test_it_goes_up_and_down_by_the_average() -> None:
    tier = Tier(AT_ONCE, [1, 3, 5], 1)
    assert [tier.tell([drafts]) or tier.steps for drafts in (1, 3, 3)] == [True, True, 5]
    assert tier.tell([0, 1])  # a half is too low for 5 steps and for what leads to 3, and too high to go on to 1
    assert tier.steps == 3
    assert tier.tell([0, 0])
    assert tier.steps == 1


def test_it_looks_now_and_then_behind_its_warm_up() -> None:
    tier = Tier(Knobs(alpha=1.0, interval=2, warmup=3), [1, 3], 1)
    assert [tier.tell([1]) for _ in range(5)] == [False, False, False, False, True]


def test_the_average_keeps_a_share_of_what_was_before() -> None:
    tier = Tier(Knobs(alpha=0.5, interval=100), [3], 3)
    tier.tell([0, 1])
    assert tier.average == 0.5 * 2 + 0.5 * 0.5


def test_rounds_without_drafts_tell_nothing_and_drafts_are_tried_again() -> None:
    tier = Tier(AT_ONCE, [0, 2, 4], 2)
    tier.tell([0])
    assert (tier.steps, tier.average) == (0, 0.0)
    tier.tell([0])
    assert (tier.steps, tier.average) == (2, 0.0)
    fresh = Tier(AT_ONCE, [0, 3], 0)
    fresh.tell([0])
    assert (fresh.steps, fresh.average) == (3, 2.0)


def test_a_ceiling_holds_down_and_never_keeps_from_going_up() -> None:
    tier = Tier(Knobs(alpha=1.0, interval=1, warmup=0, down=-16.0, ceiling=1.0), [1, 2, 4], 4)
    tier.tell([2])
    assert tier.steps == 2
    tier.tell([2])
    assert tier.steps == 4


def test_each_size_of_a_batch_has_its_tier() -> None:
    policy = Policy(2, {2: (1, 2), 4: (0, 1, 3)}, AT_ONCE)
    assert [policy.of(size).steps for size in (1, 2, 3, 4, 9)] == [2, 2, 2, 1, 1]
    assert policy.of(1) is policy.of(3)
