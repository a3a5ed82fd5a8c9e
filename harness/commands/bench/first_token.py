"""What a plain draft model loses where it never sees the first token (ledger entry standalone-shift), on the trained pair."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from safetensors.torch import load_file

from eagletwin.harness.deserved.train.cached import cached_pair
from eagletwin.harness.deserved.train.plain import LEANS, FirstToken, begun_replies, first_token, small, train_plain
from eagletwin.harness.deserved.train.settings import SIZES
from eagletwin.harness.deserved.train.text import standard_library

PROMPTS = 40


KINDS = {"as it comes": 0.0, "made to lean on its first token": LEANS}


def measure(say: Callable[[str], None]) -> dict[str, dict[int, FirstToken]]:
    """Trains the small models beside the tiny pair, and follows them. By kind of model, and by number of draft steps."""
    settings = replace(SIZES["tiny"], prompts=PROMPTS)
    folder, corpus = cached_pair(SIZES["tiny"], "cpu", say), standard_library()
    target = {name: tensor.double() for name, tensor in load_file(folder / "target" / "model.safetensors").items()}
    model = small(settings)
    said = begun_replies(replace(settings, num_steps=5), target, corpus.held_out)
    found = {}
    for kind, leans in KINDS.items():
        weights = {name: tensor.double() for name, tensor in train_plain(model, corpus, say, leans=leans).items()}
        found[kind] = {steps: first_token(model, weights, corpus.held_out, said, steps) for steps in (1, 3, 5)}
    return found


def lines(found: dict[str, dict[int, FirstToken]]) -> list[str]:
    """Of each kind of model a table, and what it is like."""
    return [line for kind, by_steps in found.items() for line in (*_lines(kind, by_steps), "")]


def _lines(kind: str, found: dict[int, FirstToken]) -> list[str]:
    one = next(iter(found.values()))
    shares = ", ".join(f"{share:.0%}" for share in one.attention)
    text = [
        f"The small model, {kind}: {one.loss:.3f} nats a byte with its first token, {one.loss_without:.3f} without; "
        f"attention on the first row, by layer: {shares}.",
        "",
        "| num_steps | tokens a round, x[i] at i | without the first token | lost |",
        "|---|---|---|---|",
    ]
    for steps, each in found.items():
        right, wrong = (1 + fmean(count for reply in side for count in reply) for side in (each.accepted, each.without))
        lost = [_length(a) - _length(b) for a, b in zip(each.accepted, each.without, strict=True)]
        error = stdev(lost) / len(lost) ** 0.5
        text.append(f"| {steps} | {right:.3f} | {wrong:.3f} | {1 - wrong / right:.1%} ± {error / right:.1%} |")
    return text


def _length(accepted: Sequence[int]) -> float:
    return 1 + fmean(accepted)
