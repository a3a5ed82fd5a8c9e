"""Whether sampled tokens have the target's distribution."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from eagletwin.harness.core.case import Case, EngineSettings, Request, Sampling, SGLangSettings
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.llama import target_rows
from eagletwin.reference.sampling import target_distribution

# Do counts agree with what was expected of them? Pearson's test, and its form for draws that differ from one to the next.
#
# Both give a chance p: that counts as far off as these come from the right distribution. The chi-square distribution is what
# they tend to for large expectations, so cells that expect less than LEAST are put together first.

# The usual rule is 5, for chances of a few percent. With five cells of 40 to 400, of two million right sets of counts a share
# of 1.14e-3 had a chance below 1e-3, 1.3e-4 one below 1e-4, and 1.2e-5 one below 1e-5.
LEAST = 40.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """statistic: 0 is perfect; freedom: its mean where all is right; chance: of one as large or larger, where all is right."""

    samples: int
    statistic: float
    freedom: int

    @property
    def chance(self) -> float:
        if self.freedom == 0:
            return 1.0
        half = torch.tensor([self.freedom / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


def pearson(counts: Tensor, chances: Tensor) -> Agreement:
    """Independent draws from one distribution. counts, chances [cells]; the chances sum to 1."""
    samples = int(counts.sum())
    observed, expected = pooled(counts.double(), chances.double() * samples)
    return Agreement(samples, float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


def pooled(counts: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the cells of small expectation put together, the smallest first, until each expects LEAST."""
    order = expected.argsort()
    counts, expected = counts[order], expected[order]
    together = int((expected.cumsum(0) < LEAST).sum()) + 1  # the fewest smallest that reach it
    if bool(expected[0] >= LEAST) or together >= len(expected):
        return (counts, expected) if bool(expected[0] >= LEAST) else (counts.sum()[None], expected.sum()[None])
    head_counts, head_expected = counts[:together].sum()[None], expected[:together].sum()[None]
    rest_counts, rest_expected = counts[together:], expected[together:]
    small = rest_expected < LEAST
    head_counts, head_expected = head_counts + rest_counts[small].sum(), head_expected + rest_expected[small].sum()
    return torch.cat([head_counts, rest_counts[~small]]), torch.cat([head_expected, rest_expected[~small]])


def as_one(parts: Sequence[Agreement]) -> Agreement:
    """Independent counts as one: a fault that is small in each of them adds up."""
    return Agreement(
        sum(part.samples for part in parts), sum(part.statistic for part in parts), sum(part.freedom for part in parts)
    )


class Drifting:
    """Draws from distributions [cells] that are different each time, and known before each draw: a token after its prefix.

    The sum of (what was drawn) - (what was expected) has a covariance that is the sum of theirs, and tends to a normal
    distribution; its square, by that covariance, is the statistic.
    """

    def __init__(self, cells: int) -> None:
        self.samples = 0
        self.excess = torch.zeros(cells, dtype=torch.float64)
        self.expected = torch.zeros(cells, dtype=torch.float64)
        self.covariance = torch.zeros(cells, cells, dtype=torch.float64)

    def add(self, drawn: Sequence[int], chances: Tensor) -> None:
        """drawn: the cell of each draw; chances [draws, cells]."""
        self.samples += len(drawn)
        self.excess += torch.bincount(torch.tensor(drawn), minlength=len(self.excess)) - chances.sum(0)
        self.expected += chances.sum(0)
        self.covariance += torch.diag(chances.sum(0)) - chances.T @ chances

    def merge(self, other: "Drifting") -> None:
        self.samples += other.samples
        self.excess += other.excess
        self.expected += other.expected
        self.covariance += other.covariance

    def agreement(self) -> Agreement:
        """The last cell follows from the others. Those that expect less than LEAST are put together with it."""
        kept = (self.expected >= LEAST).nonzero().flatten()
        kept = kept[:-1] if len(kept) == len(self.expected) else kept
        if not len(kept):
            return Agreement(self.samples, 0.0, 0)
        excess, covariance = self.excess[kept], self.covariance[kept][:, kept]
        statistic = float(excess @ torch.linalg.solve(covariance, excess))
        return Agreement(self.samples, statistic, len(kept))


# Does the worker, sampling speculatively, emit what sampling from the target alone would? Counts of tokens say so.
#
# No coin is known to this test, and nothing is asked of the draft: it knows the prompts, what was emitted, and the reference's
# target in float64. Two views of the same worker:
#
# *joint*  many requests with the same few prompts and three new tokens each: how often each sequence of tokens came, against
# its exact chance. The first token is prefill's, the others are of one verify or of two.
# *long*   many requests with prompts of their own and many new tokens: the rank of each token among its prefix's chances,
# against the chances of the ranks. This uses every token, and the whole vocabulary.
#
# A token without any chance is an error at once. How far the counts are off is judged by Pearson's test.

MODEL = "llama-tiny"
# All that is claimed holds with this chance of a false alarm, whatever the number of counts that are looked at.
SIGNIFICANCE = 1e-6
WAYS = (
    Sampling(temperature=1.0),
    Sampling(temperature=2.0, top_k=5),
    Sampling(temperature=1.5, top_p=0.8),
    Sampling(temperature=0.6),
)
PROMPTS = ((81, 42), (46, 54, 47, 39))  # of 300, two after which the target knows least what will follow
TOGETHER = 64  # requests of a case
LONG = 40  # new tokens of a request of the long view
RANKS = 10  # cells of the long view; the last is all ranks from there on

Emission = tuple[int, ...]  # new tokens


@dataclass(frozen=True, slots=True)
class Setting:
    """How the worker samples. running: requests that it runs at once; those that wait come as others end, so that decode
    batches have every size up to that."""

    name: str
    topk: int
    num_steps: int
    draft_tokens: int = 0
    rejection: bool = False
    deterministic: bool = False
    running: int = 32


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("tree", 3, 3, 8),
        Setting("chain", 1, 3),
        Setting("rejection", 1, 3, rejection=True),
        Setting("seeded-tree", 2, 2, 5, deterministic=True),
    )
}


@dataclass
class DrawTally:
    """Counts. joint: of what was emitted, by (prompt, way); long: by way; impossible: tokens of probability 0, in words."""

    joint: dict[tuple[int, int], Counter[Emission]] = field(default_factory=dict)
    long: dict[int, Drifting] = field(default_factory=dict)
    impossible: list[str] = field(default_factory=list)
    requests: int = 0

    def merge(self, other: "DrawTally") -> None:
        for key, counts in other.joint.items():
            self.joint.setdefault(key, Counter()).update(counts)
        for way, drifting in other.long.items():
            self.long.setdefault(way, Drifting(RANKS)).merge(drifting)
        self.impossible += other.impossible
        self.requests += other.requests

    def plain(self) -> bytes:
        """As JSON."""
        long = {
            str(way): (of.samples, of.excess.tolist(), of.expected.tolist(), of.covariance.tolist())
            for way, of in self.long.items()
        }
        joint = [(*key, list(counts.items())) for key, counts in self.joint.items()]
        return msgspec.json.encode({"requests": self.requests, "impossible": self.impossible, "joint": joint, "long": long})

    @classmethod
    def read(cls, data: bytes) -> "DrawTally":
        """What `plain` wrote."""
        held = msgspec.json.decode(data)
        tally = cls(requests=held["requests"], impossible=held["impossible"])
        for prompt, way, counts in held["joint"]:
            tally.joint[prompt, way] = Counter({tuple(emission): count for emission, count in counts})
        for way, (samples, excess, expected, covariance) in held["long"].items():
            drifting = Drifting(RANKS)
            drifting.samples = samples
            drifting.excess, drifting.expected, drifting.covariance = (
                torch.tensor(values, dtype=torch.float64) for values in (excess, expected, covariance)
            )
            tally.long[int(way)] = drifting
        return tally


@dataclass(frozen=True, slots=True)
class JudgedCounts:
    """One set of counts, and how well it agrees."""

    what: str
    agreement: Agreement


def joint_case(setting: Setting, number: int) -> Case:
    """Every prompt in every way, eight times each."""
    places = [(n % len(PROMPTS), n // len(PROMPTS) % len(WAYS)) for n in range(TOGETHER)]
    prompts = [(PROMPTS[prompt], way) for prompt, way in places]
    return _case(setting, f"joint-{number}", number, prompts, 3)


def long_case(setting: Setting, number: int) -> Case:
    generator = torch.Generator().manual_seed(number)
    vocabulary = RECIPES[MODEL].target.vocab_size
    prompts = [
        (tuple(torch.randint(0, vocabulary, (1 + n % 7,), generator=generator).tolist()), n % len(WAYS))
        for n in range(TOGETHER)
    ]
    return _case(setting, f"long-{number}", number, prompts, LONG)


def _case(setting: Setting, name: str, number: int, prompts: Sequence[tuple[tuple[int, ...], int]], new: int) -> Case:
    """number: what its coins come from; no two cases of a setting share one."""
    requests = []
    for n, (prompt, way) in enumerate(prompts):
        sampling = WAYS[way]
        if setting.deterministic:
            sampling = Sampling(
                temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=number * TOGETHER + n
            )
        requests.append(Request(id=f"r{n}", prompt=prompt, max_new_tokens=new, sampling=sampling))
    return Case(
        name=name,
        model=MODEL,
        requests=tuple(requests),
        topk=setting.topk,
        num_steps=setting.num_steps,
        num_draft_tokens=setting.draft_tokens,
        chunked_prefill_size=256,
        engine=EngineSettings(
            sglang=SGLangSettings(
                max_running_requests=setting.running,
                max_total_tokens=8192,
                rejection_sampling=setting.rejection,
                deterministic=setting.deterministic,
                random_seed=number,
            )
        ),
    )


def count_joint(tally: DrawTally, emitted: list[list[int]]) -> None:
    for n, tokens in enumerate(emitted):
        key = n % len(PROMPTS), n // len(PROMPTS) % len(WAYS)
        tally.joint.setdefault(key, Counter())[tuple(tokens)] += 1


def count_long(tally: DrawTally, case: Case, emitted: list[list[int]]) -> None:
    """The rank of each token but the first, which prefill sampled: joint counts have it."""
    for request, tokens in zip(case.requests, emitted, strict=True):
        way = WAYS.index(Sampling(**{name: getattr(request.sampling, name) for name in ("temperature", "top_k", "top_p")}))
        rows = chances([[*request.prompt, *tokens[:-1]]], WAYS[way])[len(request.prompt) :]  # [LONG - 1, V]
        ordered = rows.sort(dim=-1, descending=True, stable=True)
        drawn = torch.tensor(tokens[1:])
        place = (ordered.indices == drawn[:, None]).int().argmax(-1)
        for step in (rows.gather(1, drawn[:, None])[:, 0] <= 0).nonzero().flatten().tolist():
            tally.impossible.append(f"{case.name}, {request.id}: new token {step + 1} is {tokens[step + 1]}, {WAYS[way]}")
        cells = torch.cat([ordered.values[:, : RANKS - 1], ordered.values[:, RANKS - 1 :].sum(-1, keepdim=True)], -1)
        tally.long.setdefault(way, Drifting(RANKS)).add(place.clamp(max=RANKS - 1).tolist(), cells)


def chances(sequences: list[list[int]], way: Sampling) -> Tensor:
    """[rows, V] float64: of what follows each token of these sequences, one after the other."""
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    logits = target_rows(
        model_pair(MODEL).reference_target(), RECIPES[MODEL].target, tokens, [len(sequence) for sequence in sequences]
    ).logits
    return target_distribution(logits, way.temperature, way.top_k or logits.shape[-1], way.top_p)


def joint_chances(prompt: tuple[int, ...], way: Sampling, depth: int) -> dict[Emission, float]:
    """Of each sequence of `depth` new tokens that has any chance."""
    found: dict[Emission, float] = {(): 1.0}
    for _ in range(depth):
        prefixes = list(found)
        rows = _after(prompt, prefixes, way)
        found = {
            (*prefix, token): found[prefix] * chance
            for prefix, row in zip(prefixes, rows, strict=True)
            for token, chance in enumerate(row.tolist())
            if chance > 0
        }
    return found


def _after(prompt: tuple[int, ...], prefixes: list[Emission], way: Sampling) -> Iterator[Tensor]:
    """[V] after the prompt and each of the prefixes, which are equally long."""
    size = len(prompt) + len(prefixes[0])
    for start in range(0, len(prefixes), 64):
        some = [[*prompt, *prefix] for prefix in prefixes[start : start + 64]]
        yield from chances(some, way)[size - 1 :: size]


def findings(tally: DrawTally) -> list[JudgedCounts]:
    """All counts, judged. Joint ones as deep as every sequence can be listed: two tokens, three where top_k keeps few."""
    found = []
    for (prompt, way), counts in sorted(tally.joint.items()):
        depth = 3 if WAYS[way].top_k else 2
        exact = joint_chances(PROMPTS[prompt], WAYS[way], depth)
        seen = Counter[Emission]()
        for emission, count in counts.items():
            seen[emission[:depth]] += count
        tally.impossible += [f"prompt {prompt}, {WAYS[way]}: {emission}" for emission in seen if emission not in exact]
        cells = torch.tensor([seen[emission] for emission in exact])
        found.append(JudgedCounts(f"joint, prompt {prompt}, {words(way)}", pearson(cells, torch.tensor(list(exact.values())))))
    ranks = [JudgedCounts(f"long, {words(way)}", drifting.agreement()) for way, drifting in sorted(tally.long.items())]
    return [
        *(*found, JudgedCounts("joint, all", as_one([finding.agreement for finding in found]))),
        *(*ranks, JudgedCounts("long, all", as_one([finding.agreement for finding in ranks]))),
    ]


def words(way: int) -> str:
    sampling = WAYS[way]
    cuts = f", top_k {sampling.top_k}" if sampling.top_k else f", top_p {sampling.top_p}" if sampling.top_p < 1 else ""
    return f"temperature {sampling.temperature}{cuts}"
