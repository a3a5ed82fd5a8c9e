"""What the live faults of multi-layer drafts cost, by the reference: the measure itself, on a few prompts."""

from eagletwin.harness.commands.bench.acceptance_layers import FAULTS, layers_cost

BOUNDARY, TAIL, ONE_TOKEN, _ = FAULTS


def test_one_layer_keeps_no_draft_and_several_do() -> None:
    alone = layers_cost("llama-mtp", 1, BOUNDARY, seeds=1, prompts=3, new_tokens=12)
    assert (alone.stale, alone.cost) == (0.0, 0.0)
    several = layers_cost("llama-mtp-chain", 3, BOUNDARY, seeds=1, prompts=3, new_tokens=12)
    assert 0 < several.stale < 1
    assert several.wrong[0] > 1


def test_a_token_for_the_first_layer_leaves_fewer_rows_wrong_and_none_where_there_is_one_layer() -> None:
    assert layers_cost("llama-mtp", 1, ONE_TOKEN, seeds=1, prompts=2, new_tokens=8).cost == 0.0
    wrong = [layers_cost("llama-mtp", 2, fault, seeds=1, prompts=2, new_tokens=8).stale for fault in (TAIL, ONE_TOKEN)]
    assert wrong[0] > wrong[1] > 0
