"""Smaller cases made of any case: each is valid, and all together go down to the smallest there is."""

from eagletwin.cases.blocks import Asked, block_of
from eagletwin.harness.commands.fuzz.cutting import cuts
from eagletwin.harness.commands.fuzz.shrinking import size
from eagletwin.harness.families.valid import check_case


def test_cuts_are_valid_and_lead_to_one_token() -> None:
    for number in (1, 5, 8):
        case = max(block_of(0, number, Asked()).cases(), key=size)
        for cut in cuts(case):
            check_case(cut, "cut")
            assert cut != case
        while smaller := next((cut for cut in cuts(case) if size(cut) < size(case)), None):
            case = smaller
        [request] = case.requests
        assert (len(request.prompt), request.max_new_tokens, case.events, case.chunks) == (1, 1, (), ())
        assert (case.topk, case.num_steps, case.page_size) == (1, 1, 1)
