"""What rows that keep a rejected draft cost, by the reference: the measure itself, on a few prompts."""

from eagletwin.harness.acceptance_layers import boundary_cost


def test_one_layer_keeps_no_draft_and_several_do() -> None:
    alone = boundary_cost("llama-mtp", 1, prompts=3, new_tokens=12)
    assert (alone.stale, alone.cost) == (0.0, 0.0)
    several = boundary_cost("llama-mtp-chain", 3, prompts=3, new_tokens=12)
    assert 0 < several.stale < 1
    assert several.last_fed > 1
