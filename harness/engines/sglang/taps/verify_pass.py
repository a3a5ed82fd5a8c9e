"""One verify of the v2 worker: what it decided, and what it decided by."""

from dataclasses import dataclass, field
from typing import Any

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.trace import snapshot

from ..compat import names
from .coins import Coins
from .speculation import Speculation

Found = list[tuple[dict[str, int], dict[str, Array]]]  # of each request: numbers and tensors of its record


@dataclass(slots=True)
class VerifyPass:
    """Made when verify() begins, whole when it returns.

    lengths      committed tokens of each request before it, which verify moves on
    accept_lens  tokens that it commits, of each request: the accepted drafts and the bonus
    walked       v1 alone: what the walk along the trees returned: predicted, accept_index, correct
    """

    lengths: list[int]
    accept_lens: list[int] = field(default_factory=list)
    walked: tuple[Array, Array, Array] | None = None

    def returned(self, result: Any, accepted: Array, coins: Coins, of: Speculation, *, states: bool = True) -> Found:
        """accepted: nodes as numbers in the whole batch [b, S + 1]; states: those of the path are recorded as well."""
        self.accept_lens = result.accept_lens.tolist()
        predicted = snapshot(result.next_token_ids).reshape(-1, of.width)
        bonus, new_lengths = names.bonus_tokens(result.next_draft_input).tolist(), names.new_seq_lens(result).tolist()
        path = None
        if states and of.topk > 1:
            path = snapshot(result.logits_output.hidden_states).reshape(len(self.lengths), of.width, -1)
        found = []
        for n, length in enumerate(self.lengths):
            accept_len = self.accept_lens[n]
            kept = max(0, min(accept_len, of.width))  # a wrong accept_len must reach the judge, not break the tap
            tensors = {
                "predicted": predicted[n, :kept],
                "accept_index": accepted[n, :kept] - n * of.width,
            }
            tensors |= coins.of(n, tensors["accept_index"])
            if path is not None:  # a chain's path is in front as it is
                tensors["path_hidden"] = path[n, :kept]
            numbers = {
                "seq_len": length,
                "accept_len": accept_len,
                "bonus": bonus[n],
                "new_seq_len": new_lengths[n],
            }
            found.append((numbers, tensors))
        return found
