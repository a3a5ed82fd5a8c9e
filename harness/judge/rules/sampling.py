"""Verify that samples: `verify.coins`, `verify.probabilities`, `draft.probabilities`, and `verify.accept` by the coins.

The coins are the worker's own, and so are the draft tokens that it drew. What it sampled from is
compared with the reference's; what it decided is then judged by its own numbers, so that only the rounding of sums is excused.
So is the distribution that it made of its logits: these are compared with the reference's, and where top_k, top_p and min_p cut
is then judged by these.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Sampling
from eagletwin.harness.core.records import Record
from eagletwin.reference.cuts import rounding_of, targets_of_float32
from eagletwin.reference.follow_sampling import Draws, Followed, Walk, follow_chain, follow_tree
from eagletwin.reference.hashes import gumbel_noise, positional_coin, seeded_coins
from eagletwin.reference.sampling import Thresholds

from ..bounds import log_scale, logs, magnitude, sum_rounding, with_tail
from ..compare import Place
from ..context import Rules
from ..replay import Round
from ..request_logits import before_additions
from ..trees import parents_of
from . import rule, stages
from .multi_layer_draft import Layers

# What the engine makes of temperature 0. One that takes the best of all tokens at another temperature keeps it.
_GREEDY = Sampling(top_k=1)

_GRID = 2**24  # torch.rand in float32 on a CPU: an integer below this, divided by it. A GPU's numbers are finer near 0


class Samples(Rules):
    def begin(self) -> None:
        self._on = self._case.samples and self._model.numbers
        self._drawn: dict[tuple[float, ...], Record] = {}  # coins -> the round that had them
        self._before: dict[str, list[float]] = {}  # request -> all coins of its round before
        self._beside: tuple[int, list[list[float]]] = (-1, [])  # a forward, and the coins of the requests seen of it
        self._seeds: dict[str, int] = {}  # request -> what its choices are hashed from, where they are by places
        # where a request's choices may be hashed from another seed: it was prefilled again
        self._again = {(one.request, one.round) for one in self._trace.header.records if one.stage == "prefill" and one.round}
        self._shared = 0  # single coins that are also coins of the round before, or of another request

    def first_token(self, place: Place, sampling: Sampling, logits: Array, token: int, index: str) -> None:
        """The token that a prefill samples, by unrecorded coins: the distribution must contain it. logits [V].

        The engine's sampler cuts at top_k and at top_p, both in the whole distribution.
        """
        rule = "output.tokens"
        self._compare.not_seen((rule,), 1)
        if not self._compare.on(rule):
            return
        if not 0 <= token < len(logits):
            self._compare.report(place, rule, index, "a token of the vocabulary", token)
            return
        exact = torch.from_numpy(logits) / sampling.temperature
        error = self._bounds.relative * float(magnitude(exact.numpy()))
        if not bool(exact[token].isfinite()):
            allowed = "a token that the request's processor, grammar and min_new_tokens allow"
            self._compare.report(place, rule, index, allowed, f"{token}, which one of them forbids")
            return
        below = float(exact.max() - exact[token])  # in log-probability
        if sampling.min_p > 0 and below > 2 * error - math.log(sampling.min_p):
            expected = f"a token with at least {sampling.min_p} of the best one's probability"
            self._compare.report(place, rule, index, expected, f"{token}, which has {math.exp(-below):.6g} of it")
            return
        above = exact > exact[token] + 2 * error
        before = float(exact.softmax(-1)[above].sum())
        if 0 < sampling.top_k <= int(above.sum()):
            self._compare.report(
                place, rule, index, f"one of the {sampling.top_k} best tokens", f"{token}, which is none of them"
            )
        elif before > sampling.top_p + 2 * error + 1e-5:
            reported = f"{token}, which {before:.6g} of it come before"
            self._compare.report(place, rule, index, f"one of the best tokens that have {sampling.top_p} of the mass", reported)

    @rule("verify.coins", "3.5", weights="no")
    @stages("verify")
    def coins(self, number: int, record: Record) -> None:
        """Coins are at least 0 and below 1. No two rounds have the same coins, and at most one coin of a trace is also a coin
        of the round before it or of another request in its batch. The coins of a seeded request are hashed from its seed,
        its length and the node. Others are as torch.rand draws them: on a CPU, multiples of 2**-24. An engine that hashes all
        of them does so from the place of each node, and a seed of the request's own: the one it asks for, or one that is drawn
        whenever its prompt is computed."""
        sampling, place, rule = self._case.sampling_of(record.request), Place(record, "verify"), "verify.coins"
        if "places" in record.tensors and self._on:
            self._places(number, record)
            return
        if "coins" not in record.tensors and self._on:
            if sampling is not None and self._compare.on("verify.accept"):
                self._compare.report(place, "verify.accept", "the whole round", "a verify that samples", "a greedy one")
            return
        if not self._on or not self._compare.on(rule):
            return
        coins = [float(coin) for name in ("coins", "final_coins") for coin in self._trace.tensor(number, name).tolist()]
        wrong = [n for n, coin in enumerate(coins) if not 0 <= coin < 1]
        if wrong:
            self._compare.report(place, rule, f"coin {wrong[0]}", "a number from 0 to below 1", coins[wrong[0]])
            return
        if sampling is not None and sampling.seed is not None:
            expected = seeded_coins(sampling.seed, record.numbers["seq_len"], len(coins) - 1)
            differ = [n for n, (one, other) in enumerate(zip(expected, coins, strict=True)) if one != other]
            if differ:
                at = differ[0]
                self._compare.report(place, rule, f"coin {at} (the last is the final one)", expected[at], coins[at])
        elif not self._case.engine.sglang.deterministic:
            changed = [n for n, coin in enumerate(coins) if not (coin * _GRID).is_integer()]
            if changed and self._trace.header.engine.device == "cpu":
                at, drawn = changed[0], "as torch.rand draws it on a CPU: a multiple of 2**-24"
                self._compare.report(
                    place, rule, f"coin {at} (the last is the final one)", drawn, f"{coins[at]:.9g}, which is none"
                )
                return
            self._compare.not_seen((rule,), 1)  # one round cannot show whether they are random
            before = self._drawn.setdefault(tuple(coins[:-1]), record)
            if before is not record:
                reported = f"those of request {before.request}, round {before.round}"
                self._compare.report(place, rule, "coins of all nodes", "coins of this round's own", reported)
                return
            shared = self._shares(record, coins)
            if shared and self._shared > 1:
                reported = "that of the round before, or of another request of the batch, and not for the first time"
                self._compare.report(
                    place, rule, f"coin {shared[0]} (the last is the final one)", "a coin of its own", reported
                )

    def _places(self, number: int, record: Record) -> None:
        """From what a round's choices are hashed."""
        sampling, rule, seed = self._case.sampling_of(record.request), "verify.coins", record.numbers["seed"]
        place, first = Place(record, "verify"), record.numbers["seq_len"]
        places = self._trace.integers(number, "places")
        self._compare.integers(place, rule, list(range(first, first + len(places))), places, "place of node", 0)
        asked = None if sampling is None else sampling.seed
        if (record.request, record.round) in self._again:
            self._seeds.pop(record.request, None)
        own = self._seeds.setdefault(record.request, seed if asked is None else asked)
        self._compare.integers(place, rule, [own], [seed], "seed of round", record.round)
        other = next((name for name, one in self._seeds.items() if one == seed and name != record.request), "")
        if other and asked is None and self._compare.on(rule):
            self._compare.report(place, rule, "seed", "one of its own", f"that of request {other}")

    @rule("verify.probabilities", "3.5", weights="yes")
    @stages("verify")
    def targets(self, number: int, record: Record) -> None:
        """Verify samples from softmax(logits / temperature) of the target at each accepted node, cut at top_k, at top_p and at
        min_p. Its logits are the reference's, within the bound; the distribution is that of exactly its logits, within the
        roundings of float32."""
        if not self._on or "target_logits" not in record.tensors:
            return
        replay, round, place = self._replay(record), self._round(record), Place(record, "verify")
        asked = self._case.request(record.request).sampling or _GREEDY
        judged = replay.allowing(range(round.committed, round.end))
        logits, targets = replay.chosen_by(round)[: len(judged)], self._targets(number, judged)
        own = self._trace.tensor(number, "target_logits")[: len(logits)]
        computed = logits if replay.target.plain is None else replay.target.plain[judged.start : judged.stop]
        self._made_of_its_logits(place, asked, logits, targets, own, computed)

    def _targets(self, number: int, judged: range) -> Tensor:
        return self._trace.tensor(number, "target_probabilities")[: len(judged)]

    def _shares(self, record: Record, coins: list[float]) -> list[int]:
        """Which of a round's coins [D + 1] are another's too. One in 2**24 is so by chance: a trace may have one, not two."""
        if self._beside[0] != record.forward:
            self._beside = record.forward, []
        others = [*self._beside[1], *(before for before in [self._before.get(record.request)] if before)]
        shared = [n for n, coin in enumerate(coins) if any(n < len(other) and other[n] == coin for other in others)]
        self._shared += len(shared)
        self._beside[1].append(coins)
        self._before[record.request] = coins
        return shared

    def _made_of_its_logits(
        self, place: Place, sampling: Sampling, logits: Array, targets: Tensor, own: Tensor, computed: Array
    ) -> None:
        """Rows of the accepted nodes; of others nothing is read.

        own [n, V]: the logits that the worker made them of; computed [n, V]: the reference's before the request's own changes.
        These may take the largest one away, and it is what the error of all scales with.
        """
        rule, request, relative = "verify.probabilities", self._case.request(place.record.request), self._bounds.relative
        if len(logits) != len(targets) and self._compare.on(rule):
            self._compare.report(place, rule, "number of nodes", len(logits), len(targets))
        for node, (row, mine, actual) in enumerate(zip(torch.from_numpy(logits), own, targets, strict=False)):
            size = np.maximum(magnitude(before_additions(request, row.numpy())), magnitude(computed[node]))
            error = float(relative * size + 2.0**-24 * magnitude(row.numpy()))
            rows = [("logits", *_finite(row, mine), error / relative)]
            if bool(((row == mine) | ((row - mine.double()).abs() <= error)).all()):  # else this is what is wrong
                possible = self._possible(sampling, mine)
                rounded = rounding_of(mine, sampling.temperature).sum
                rows += [("logarithms", *pair, rounded / relative) for pair in _nearest(possible, actual)]
            self._compare_rows(place, node, rows)

    def _possible(self, sampling: Sampling, logits: Tensor) -> list[Tensor]:
        """Rows [V] that may be what is sampled from; none where there are too many. If it is not one, that is counted."""
        cuts = (sampling.temperature, sampling.top_k or len(logits), sampling.top_p, sampling.min_p)
        try:
            possible = targets_of_float32(logits, *cuts)
        except ValueError:
            possible = []
        if len(possible) != 1:
            self._compare.not_seen(("verify.probabilities",), 1)
            self._compare.count_decisions(1, 1)
        return possible

    def _compare_rows(self, place: Place, node: int, rows: Sequence[tuple[str, Array, Array, float]]) -> None:
        """As one comparison; of each row what it is, what it must be, what it is there, and what its bound scales with."""
        if not rows:
            return
        names, expected, actual, scales = zip(*rows, strict=True)

        def name(n: int) -> str:
            return f"{names[n]} of what follows accepted node {node}"

        self._compare.floats(place, "verify.probabilities", np.stack(expected), np.stack(actual), name, np.array(scales))

    @rule("draft.probabilities", "3.5", weights="yes")
    @stages("verify")
    def drafts(self, number: int, record: Record) -> None:
        """The draft distribution q that rejection sampling uses is softmax(logits / temperature) of the draft's row that
        proposed the token."""
        # Row s is what d[s+1] was drawn from: the draft's, at the request's temperature, without cuts.
        if not self._on or "draft_probabilities" not in record.tensors:
            return
        round, place = self._round(record), Place(record, "verify")
        layers = self._context.of(Layers).proposed_from(record.request) if self._model.mtp_layers else None
        logits = self._replay(record).growths[record.round].logits if layers is None else layers
        logits = logits[: round.steps]  # of a chain; the reference goes on as far as the longest round
        drafts, asked = (
            self._trace.tensor(number, "draft_probabilities"),
            self._case.request(record.request).sampling or _GREEDY,
        )
        softmax = (torch.from_numpy(logits) / asked.temperature).softmax(-1)
        expected, reported = logs(softmax.numpy()), logs(drafts.numpy())
        scale = log_scale(logits, asked.temperature)
        self._compare.floats(
            place, "draft.probabilities", expected, reported, lambda n: f"logarithms of what d[{n + 1}] was drawn from", scale
        )
        if self._case.sampling_of(record.request) is None:
            return
        for step, token in enumerate(round.drafted):
            if self._compare.on("draft.proposal") and not (0 <= token < drafts.shape[1] and float(drafts[step, token]) > 0):
                index = f"d[{step + 1}]"
                self._compare.report(place, "draft.proposal", index, "a token that could be drawn", f"{token}, which could not")

    @stages("verify")
    def decisions(self, number: int, record: Record) -> None:
        """What a request that samples must commit: a part of `verify.accept`."""
        by_chance = {"coins", "places"} & {*record.tensors}
        if not self._on or not by_chance or self._case.sampling_of(record.request) is None:
            return
        round = self._round(record)
        accepted = range(round.committed, round.end)
        judged = self._replay(record).allowing(accepted)
        with self._compare.looking_away(judged != accepted):
            self._decisions(number, record, round, self._targets(number, judged))
        self._compare.left_out("verify.probabilities", len(accepted) - len(judged))

    def _decisions(self, number: int, record: Record, round: Round, targets: Tensor) -> None:
        rule, place, bonus = "verify.accept", Place(record, "verify"), record.numbers["bonus"]
        parents = parents_of(self._case, round)
        if parents is None or not self._compare.on(rule):  # no tree: reported where it was made
            return
        drafts = self._trace.tensor(number, "draft_probabilities") if "draft_probabilities" in record.tensors else None
        width = targets.shape[1]
        if not 0 <= bonus < width or len(targets) != len(round.path):
            self._compare.report(place, rule, "bonus token", "a token of the vocabulary, behind the accepted path", bonus)
            return
        draws, logarithms = self._draws(number, record, round, width)
        own = [sum_rounding(width) + logarithms] * len(parents)  # of the engine's own sums
        rows: list[list[Tensor]] = [[] for _ in parents]
        try:
            for node, row in zip(round.path, targets.double(), strict=True):
                rows[node] = [row]
            tokens, settings = [round.bonus, *round.drafted], self._case.engine.sglang
            walk = Walk(round.path, bonus)
            if drafts is None:
                thresholds = Thresholds(settings.accept_single, settings.accept_acc)
                followed = follow_tree(rows, tokens, parents, draws, walk, own, thresholds)
            else:
                followed = follow_chain(rows, drafts.double(), tokens, draws, walk, own, [0.0] * len(drafts))
        except (ValueError, IndexError) as error:
            self._compare.report(place, rule, "accepted nodes", "a path of the tree", f"{round.path} ({error})")
            return
        self._compare.count_decisions(followed.decisions, followed.ties)
        self._report(place, followed, draws)

    def _draws(self, number: int, record: Record, round: Round, width: int) -> tuple[Draws, float]:
        """By what a round was decided; and how far off a probability is, of itself, where that was done in logarithms.

        A logarithm in float32 is the logit less a sum's logarithm, and noise comes on top: four roundings of the largest of
        these, and noise is below 32.
        """
        if "places" not in record.tensors:
            coins: list[float] = self._trace.tensor(number, "coins").double().tolist()
            return Draws(coins, float(self._trace.tensor(number, "final_coins"))), 0.0
        places, seed = self._trace.integers(number, "places"), record.numbers["seed"]
        sampling = self._case.sampling_of(record.request)
        assert sampling is not None
        logits = self._trace.array(number, "target_logits") / sampling.temperature
        relative = 2.0**-22 * (float(magnitude(logits).max(initial=0.0)) + 32)
        coins = [positional_coin(seed, place) for place in places]
        noise = gumbel_noise(seed, places[min(round.path[-1], len(places) - 1)], width)
        return Draws(coins, noise=noise, relative=relative), relative

    def _report(self, place: Place, followed: Followed, draws: Draws) -> None:
        wrong = followed.illegal
        if wrong is not None:
            coin = draws.final if wrong.kind == "bonus" else draws.coins[wrong.node]
            reported = {"accept": "accepted", "refuse": "refused", "bonus": "drawn as the bonus token"}[wrong.kind]
            by = f" (by {wrong.by:.3g})" if math.isfinite(wrong.by) else ""  # whatever the coin
            hashed = draws.noise is not None and wrong.kind == "bonus"
            expected = f"noise of its place: {wrong.why}" if hashed else f"coin {coin:.6g}: {wrong.why}"
            actual = f"token {wrong.token} {reported}{by}"
            self._compare.report(place, "verify.accept", f"decision at node {wrong.node}", expected, actual)


def _nearest(possible: Sequence[Tensor], actual: Tensor) -> list[tuple[Array, Array]]:
    """Of the rows that are possible the one that is nearest to the actual one [V], and that one, as logarithms: one pair, or
    none if nothing is possible."""
    pairs = [(logs(one.numpy()), logs(with_tail(actual, one).numpy())) for one in possible]
    return sorted(pairs, key=lambda pair: float(np.nan_to_num(abs(pair[0] - pair[1]), nan=np.inf).max()))[:1]


def _finite(expected: Tensor, actual: Tensor) -> tuple[Array, Array]:
    """Logits [V] with 0 for those that both forbid: minus infinity less itself is no number."""
    both = expected.isneginf() & actual.isneginf()
    return expected.masked_fill(both, 0.0).numpy(), actual.double().masked_fill(both, 0.0).numpy()
