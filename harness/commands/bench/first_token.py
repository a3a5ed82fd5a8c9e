"""What a plain draft model loses where it never sees the first token (ledger entry standalone-shift), on the trained pair."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from safetensors.torch import load_file

from eagletwin.harness.deserved.train.cached import cached_pair
from eagletwin.harness.deserved.train.plain import FirstToken, begun_replies, first_token, small, train_plain
from eagletwin.harness.deserved.train.settings import SIZES
from eagletwin.harness.deserved.train.text import standard_library

PROMPTS = 40


def measure(say: Callable[[str], None]) -> dict[int, FirstToken]:
    """Trains the small model beside the tiny pair, and follows it. By number of draft steps."""
    settings = replace(SIZES["tiny"], prompts=PROMPTS)
    folder, corpus = cached_pair(SIZES["tiny"], "cpu", say), standard_library()
    target = {name: tensor.double() for name, tensor in load_file(folder / "target" / "model.safetensors").items()}
    model = small(settings)
    weights = {name: tensor.double() for name, tensor in train_plain(model, corpus, say).items()}
    said = begun_replies(replace(settings, num_steps=5), target, corpus.held_out)
    return {steps: first_token(model, weights, corpus.held_out, said, steps) for steps in (1, 3, 5)}


def lines(found: dict[int, FirstToken]) -> list[str]:
    """A table, and what the model is like."""
    one = next(iter(found.values()))
    shares = ", ".join(f"{share:.0%}" for share in one.attention)
    text = [
        f"The small model: {one.loss:.3f} nats a byte with its first token, {one.loss_without:.3f} without; "
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
