"""How often do the sampling kernels draw a token that has no probability? `python -m tests.gpu.near_one`, on a GPU.

The last token of the vocabulary is what they give when rounding makes coin * sum reach the end of the running sum. Here it has
no probability. Coins are the 64 largest that torch.rand gives, a step of 2 ** -24 apart; each is drawn with that chance. So
wrong draws, divided by targets and by 2 ** 24, are the chance per token of the vocabulary's last one.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"

import torch

from eagletwin.harness.commands.kernels.release import SAMPLING

from .test_kernels import load, tree_sampler

COINS, TARGETS = 64, 50


def main() -> None:
    samplers = {"chain (Triton)": load(SAMPLING).chain_speculative_sampling_triton, "tree (C++)": tree_sampler()}
    torch.set_default_device("cuda")
    print("| kernel | vocabulary | top_k | wrong draws of 3,200 | chance per token |\n|---|---|---|---|---|")
    for name, sample in samplers.items():
        for vocabulary in (64, 1_000, 32_000, 128_256):
            for top_k in (20, vocabulary - 1):
                wrong = sum(draws(sample, vocabulary, top_k, seed) for seed in range(TARGETS))
                print(f"| {name} | {vocabulary} | {top_k} | {wrong} | {wrong / TARGETS / 2**24:.1e} |")


def draws(sample: object, vocabulary: int, top_k: int, seed: int) -> int:
    """Of one target row, with each coin: how many give the last token. One draft, which is refused."""
    generator = torch.Generator("cuda").manual_seed(seed)
    row = torch.randn(vocabulary, generator=generator).mul(2).softmax(-1)
    row[-1] = row[0] = 0  # the draft token and the last one
    row[row < row.sort(descending=True).values[top_k - 1]] = 0
    targets = (row / row.sum()).expand(COINS, 2, vocabulary).contiguous()
    drafts = torch.zeros_like(targets)
    drafts[:, 0, 0] = 1e-9  # positive, so that a chain's draft is one that can be drawn
    predicts = torch.full((COINS * 2,), -7, dtype=torch.int32)
    arguments = {
        "predicts": predicts,
        "accept_index": torch.full((COINS, 2), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(COINS, dtype=torch.int32),
        "candidates": torch.zeros(COINS, 2, dtype=torch.int64),
        "retrive_index": torch.arange(COINS * 2).reshape(COINS, 2),
        "retrive_next_token": torch.tensor([[1, -1]] * COINS),
        "retrive_next_sibling": torch.full((COINS, 2), -1),
        "uniform_samples": torch.full((COINS, 2), 0.5),
        "uniform_samples_for_final_sampling": (1 - torch.arange(1, COINS + 1, dtype=torch.float64) * 2.0**-24).float(),
        "target_probs": targets,
        "draft_probs": drafts,
        "threshold_single": 1.0,
        "threshold_acc": 1.0,
        "deterministic": True,
    }
    sample(**arguments)  # type: ignore[operator]
    return int((predicts[::2] == vocabulary - 1).sum())


if __name__ == "__main__":
    main()
