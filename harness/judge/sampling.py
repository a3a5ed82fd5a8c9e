"""Verify that samples: `verify.coins`, `verify.probabilities`, `draft.probabilities`, and `verify.accept` by the coins.

Called by rules.py. The coins are the worker's own, and so are the draft tokens that it drew. What it sampled from is compared
with the reference's; what it decided is then judged by its own numbers, so that only the rounding of sums is to be excused.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.case import Sampling
from eagletwin.harness.slot_runs import Array
from eagletwin.harness.trace import Record, Trace
from eagletwin.reference.coins import seeded_coins
from eagletwin.reference.follow_sampling import Followed, Illegal, follow_chain, follow_tree, possible_targets
from eagletwin.reference.sampling import Thresholds

from .bounds import Bounds, magnitude
from .choices import logs
from .compare import Compare, Place
from .story import Round, Story

_GREEDY = Sampling(top_k=1)  # what SGLang makes of temperature 0


class Samples:
    """Judges what hangs on chance in one trace."""

    def __init__(self, trace: Trace, compare: Compare, bounds: Bounds) -> None:
        self._trace, self._compare, self._bounds = trace, compare, bounds
        self._case = trace.header.case
        self._drawn: dict[tuple[float, ...], Record] = {}  # coins -> the round that had them
        self._before: dict[str, list[float]] = {}  # request -> all coins of its round before
        self._beside: tuple[int, list[list[float]]] = (-1, [])  # a forward, and the coins of the requests seen of it
        self._shared = 0  # single coins that are those of the round before, or of a request beside

    def first_token(self, place: Place, logits: Array, token: int, index: str) -> None:
        """What a prefill samples, by coins that nobody sees: it must be a token that the distribution has at all. logits [V].

        SGLang's sampler cuts at top_k and at top_p, both in the whole distribution.
        """
        rule, asked = "output.tokens", self._case.sampled(place.record.request)
        assert asked is not None
        self._compare.not_seen((rule,), 1)
        if not self._compare.on(rule):
            return
        if not 0 <= token < len(logits):
            self._compare.report(place, rule, index, "a token of the vocabulary", token)
            return
        exact = torch.from_numpy(logits) / asked.temperature
        error = self._bounds.relative * float(magnitude(exact.numpy()))
        above = exact > exact[token] + 2 * error
        before = float(exact.softmax(-1)[above].sum())
        if 0 < asked.top_k <= int(above.sum()):
            self._compare.report(place, rule, index, f"one of the {asked.top_k} best tokens", f"{token}, which is none of them")
        elif before > asked.top_p + 2 * error + 1e-5:
            said = f"{token}, which {before:.6g} of it come before"
            self._compare.report(place, rule, index, f"one of the best tokens that have {asked.top_p} of the mass", said)

    def verified(
        self, number: int, record: Record, story: Story, round: Round, parents: Sequence[int] | None, proposed_from: Array
    ) -> bool:
        """Judge what a verify did by its coins; False if none of what it commits hangs on any.

        parents: of the nodes [D]; proposed_from [S, V]: the logits of the draft's rows, of which row s proposed d[s+1]
        """
        asked, place = self._case.sampled(record.request), Place(record, "verify")
        if "coins" not in record.tensors:
            if asked is not None and self._compare.on("verify.accept"):
                self._compare.report(place, "verify.accept", "the whole round", "a verify that samples", "a greedy one")
            return asked is not None
        self._coins(number, record, place, asked)
        assert story.target is not None
        logits = story.target.logits[round.committed : round.end]
        targets = self._trace.tensor(number, "target_probabilities")[: len(logits)]
        self._target_probabilities(place, asked or _GREEDY, logits, targets)
        drafts = None
        if "draft_probabilities" in record.tensors:
            drafts = self._trace.tensor(number, "draft_probabilities")
            self._draft_probabilities(place, asked or _GREEDY, proposed_from, drafts, round)
        if asked is None:
            return False  # what a greedy request must commit hangs on no coin
        self._decisions(number, record, round, parents, targets, drafts)
        return True

    def _coins(self, number: int, record: Record, place: Place, asked: Sampling | None) -> None:
        """They are coins; no two rounds have the same; those of a seed are its own."""
        rule = "verify.coins"
        if not self._compare.on(rule):
            return
        coins = [float(coin) for name in ("coins", "final_coins") for coin in self._trace.tensor(number, name).tolist()]
        wrong = [n for n, coin in enumerate(coins) if not 0 <= coin < 1]
        if wrong:
            self._compare.report(place, rule, f"coin {wrong[0]}", "a number from 0 to below 1", coins[wrong[0]])
            return
        if asked is not None and asked.seed is not None:
            expected = seeded_coins(asked.seed, record.numbers["seq_len"], self._case.num_draft_tokens)
            differ = [n for n, (must, has) in enumerate(zip(expected, coins, strict=True)) if must != has]
            if differ:
                at = differ[0]
                self._compare.report(place, rule, f"coin {at} (the last is the final one)", expected[at], coins[at])
        elif not self._case.engine.sglang.deterministic:
            self._compare.not_seen((rule,), 1)  # whether they are random, nobody can tell from one round
            before = self._drawn.setdefault(tuple(coins[:-1]), record)
            if before is not record:
                said = f"those of request {before.request}, round {before.round}"
                self._compare.report(place, rule, "coins of all nodes", "coins of this round's own", said)
                return
            shared = self._shares(record, coins)
            if shared and self._shared > 1:
                said = "that of the round before, or of another request of the batch, and not for the first time"
                self._compare.report(place, rule, f"coin {shared[0]} (the last is the final one)", "a coin of its own", said)

    def _shares(self, record: Record, coins: list[float]) -> list[int]:
        """Which of a round's coins [D + 1] are not its own. One of 2**24 is so by chance: two in a trace are none."""
        if self._beside[0] != record.forward:
            self._beside = record.forward, []
        others = [*self._beside[1], *(before for before in [self._before.get(record.request)] if before)]
        shared = [n for n, coin in enumerate(coins) if any(n < len(other) and other[n] == coin for other in others)]
        self._shared += len(shared)
        self._beside[1].append(coins)
        self._before[record.request] = coins
        return shared

    def _target_probabilities(self, place: Place, asked: Sampling, logits: Array, targets: Tensor) -> None:
        """Rows of the accepted nodes; of others nothing is read."""
        rule = "verify.probabilities"
        if len(logits) != len(targets) and self._compare.on(rule):
            self._compare.report(place, rule, "number of nodes", len(logits), len(targets))
        for node, (row, has) in enumerate(zip(torch.from_numpy(logits), targets, strict=False)):
            size = magnitude(row.numpy())
            error = self._bounds.relative * float(size)
            try:
                possible = possible_targets(row, asked.temperature, asked.top_k or len(row), asked.top_p, error)
            except ValueError:  # there are too many ways to cut it
                possible = []
            if len(possible) != 1:  # within the bound of its logits several sets of tokens could be kept
                self._compare.not_seen((rule,), 1)
                self._compare.decided(1, 1)
            if not possible:
                continue
            pairs = [(logs(one.numpy()), logs(_with_tail(has, one).numpy())) for one in possible]
            expected, said = min(pairs, key=lambda pair: float(np.nan_to_num(abs(pair[0] - pair[1]), nan=np.inf).max()))
            scale = np.array([2 * size / asked.temperature])

            def name(_: int, node: int = node) -> str:
                return f"logarithms of what follows accepted node {node}"

            self._compare.floats(place, rule, expected[None], said[None], name, scale)

    def _draft_probabilities(self, place: Place, asked: Sampling, logits: Array, drafts: Tensor, round: Round) -> None:
        """Row s is what d[s+1] was drawn from: the draft's, at the request's temperature, without cuts."""
        softmax = (torch.from_numpy(logits) / asked.temperature).softmax(-1)
        expected, said = logs(softmax.numpy()), logs(drafts.numpy())
        scale = 2 * magnitude(logits) / asked.temperature
        self._compare.floats(
            place, "draft.probabilities", expected, said, lambda n: f"logarithms of what d[{n + 1}] was drawn from", scale
        )
        if self._case.sampled(place.record.request) is None:
            return
        for step, token in enumerate(round.drafted):
            if self._compare.on("draft.proposal") and not (0 <= token < drafts.shape[1] and float(drafts[step, token]) > 0):
                index = f"d[{step + 1}]"
                self._compare.report(place, "draft.proposal", index, "a token that could be drawn", f"{token}, which could not")

    def _decisions(
        self,
        number: int,
        record: Record,
        round: Round,
        parents: Sequence[int] | None,
        targets: Tensor,
        drafts: Tensor | None,
    ) -> None:
        rule, place, bonus = "verify.accept", Place(record, "verify"), record.numbers["bonus"]
        if parents is None or not self._compare.on(rule):  # no tree: reported where it was made
            return
        coins: list[float] = self._trace.tensor(number, "coins").double().tolist()
        final = float(self._trace.tensor(number, "final_coins"))
        width = targets.shape[1]
        if not 0 <= bonus < width or len(targets) != len(round.path):
            self._compare.report(place, rule, "bonus token", "a token of the vocabulary, behind the accepted path", bonus)
            return
        own = [_rounding(width)] * len(parents)  # of the engine's own sums
        rows: list[list[Tensor]] = [[] for _ in parents]
        try:
            for node, row in zip(round.path, targets.double(), strict=True):
                rows[node] = [row]
            tokens, settings = [round.bonus, *round.drafted], self._case.engine.sglang
            if drafts is None:
                followed = follow_tree(
                    rows,
                    tokens,
                    parents,
                    coins,
                    final,
                    round.path,
                    bonus,
                    own,
                    Thresholds(settings.accept_single, settings.accept_acc),
                )
            else:
                followed = follow_chain(
                    rows, drafts.double(), tokens, coins, final, round.path, bonus, own, [0.0] * len(drafts)
                )
        except (ValueError, IndexError) as error:
            self._compare.report(place, rule, "accepted nodes", "a path of the tree", f"{round.path} ({error})")
            return
        self._compare.decided(followed.decisions, followed.ties)
        self._report(place, followed, coins, final)

    def _report(self, place: Place, followed: Followed, coins: list[float], final: float) -> None:
        wrong = followed.illegal
        if wrong is not None:
            coin = final if wrong.kind == "bonus" else coins[wrong.node]
            said = {"accept": "accepted", "refuse": "refused", "bonus": "drawn as the bonus token"}[wrong.kind]
            must, has = _argument(wrong, coin), f"token {wrong.token} {said} (by {wrong.by:.3g})"
            self._compare.report(place, "verify.accept", f"decision at node {wrong.node}", must, has)


def _with_tail(has: Tensor, expected: Tensor) -> Tensor:
    """A row [V] with its tail put back, where it is 0: the smallest probabilities, as far as their sum is lost in the rounding
    of a float32 sum of all. A cut at top_p 1, made for another request of the batch, may take them off."""
    order = expected.argsort()
    lost = torch.zeros_like(expected, dtype=torch.bool)
    lost[order] = expected[order].cumsum(0) <= _rounding(len(expected))
    return torch.where(lost & (has == 0), expected, has.double())


def _rounding(size: int) -> float:
    """Of any float32 sum of `size` probabilities, in whatever order."""
    return (size + 16) * 2.0**-24


def _argument(wrong: Illegal, coin: float) -> str:
    return f"coin {coin:.6g}: {wrong.why}"
