"""A whole pair: trained, measured, and written into a folder.

* `target/`, `eagle/`, `eagle3/`, `mtp/` are checkpoints as SGLang and transformers read them: config.json,
  generation_config.json, model.safetensors.
* `prompts.jsonl` has prompts that no model was trained on, as `eagletwin acceptance --prompts` reads them.
* `pair.json` says what the pair was made of, how good it is, how long it took, and the digest of every file.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagletwin.harness.core.files import installed_version
from eagletwin.harness.families import family_of
from eagletwin.harness.families.recipe import Part, Recipe
from eagletwin.harness.families.store import checkpoint_files

from .distil import train_draft
from .heads import DraftPlan, Weights, draft_plans
from .measure import accept_lengths, replies
from .settings import BEGIN, END, PairSettings
from .target import train_target
from .text import Corpus, frequent_tokens, prompts

PARTS = ("target", "eagle", "eagle3", "mtp")
PROMPTS, FACTS = "prompts.jsonl", "pair.json"
_GENERATION = {"bos_token_id": BEGIN, "eos_token_id": END, "do_sample": False}


@dataclass
class Training:
    """A pair on its way: its weights by part, float32 on the CPU, and what pair.json will say of them."""

    settings: PairSettings
    plans: dict[str, DraftPlan]
    weights: dict[str, Weights] = field(default_factory=dict)
    held_out: dict[str, Any] = field(default_factory=dict)
    accept_lengths: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def make_pair(settings: PairSettings, corpus: Corpus, device: str, folder: Path, say: Callable[[str], None]) -> None:
    """Train a pair and write it into an empty folder. Raises HarnessError if transformers is missing."""
    with repeatable(device):
        made = train(settings, corpus, device, say)
    digests, files = {}, {f"{part}/{name}": content for part in PARTS for name, content in part_files(made, part).items()}
    files[PROMPTS] = "".join(json.dumps({"input_ids": ids}) + "\n" for ids in prompts(corpus.held_out)).encode()
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        digests[name] = hashlib.sha256(content).hexdigest()
    facts = {
        "size": settings.name,
        "settings": asdict(settings),
        "parameters": {part: sum(map(Tensor.numel, made.weights[part].values())) for part in PARTS},
        "text": {"digest": corpus.digest, "training": len(corpus.training), "held_out": len(corpus.held_out)},
        "held_out_loss": made.held_out,
        "accept_lengths": made.accept_lengths,
        "device": device,
        "versions": {
            "python": platform.python_version(),
            **{name: installed_version(name) for name in ("torch", "transformers")},
        },
        "seconds": {name: round(seconds, 1) for name, seconds in made.seconds.items()},
        "files": digests,
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


@contextmanager
def repeatable(device: str) -> Iterator[None]:
    """On a GPU, take torch's deterministic algorithms wherever it has one. A CPU of so many threads is deterministic anyway."""
    before, only_warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts, which is with the first product
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)


def train(settings: PairSettings, corpus: Corpus, device: str, say: Callable[[str], None]) -> Training:
    """All weights of a pair, and how good they are."""
    frequent = frequent_tokens(corpus.training, settings.draft_vocab_size, settings.target.vocab_size)
    made = Training(settings, draft_plans(settings, frequent))
    clock = time.monotonic()

    def lap(name: str) -> None:
        nonlocal clock
        made.seconds[name], clock = time.monotonic() - clock, time.monotonic()

    say(f"{settings.name}: the target, on {len(corpus.training) / 1e6:.1f} million bytes of Python's library")
    made.weights["target"], made.held_out["target"] = train_target(settings, corpus, device, say)
    lap("target")
    target = {name: tensor.to(device) for name, tensor in made.weights["target"].items()}
    for name, plan in made.plans.items():
        say(f"{settings.name}: the draft {name}")
        made.weights[name], made.held_out[name] = train_draft(settings, plan, target, corpus, say)
        lap(name)
    say(f"{settings.name}: accept lengths of {settings.prompts} held-out prompts, {settings.num_steps} drafts a round")
    exact = {part: {name: tensor.double() for name, tensor in weights.items()} for part, weights in made.weights.items()}
    said = replies(settings, exact["target"], corpus.held_out)
    for name, plan in made.plans.items():
        lengths = accept_lengths(settings, plan, exact[name], exact["target"], said)
        made.accept_lengths[name] = asdict(lengths)
        shares = ", ".join(f"{share:.2f}" for share in lengths.accepted)
        say(f"  {name}: {lengths.accept_length:.2f} tokens a round; share of rounds that accept 1, 2, … drafts: {shares}")
    lap("accept lengths")
    made.seconds["all"] = sum(made.seconds.values())
    return made


def part_files(made: Training, part: str) -> dict[str, bytes]:
    """A checkpoint: file name -> contents."""
    recipe, checkpoint = _laid_out(made, part)
    tokens = {"bos_token_id": BEGIN, "eos_token_id": END}
    files = checkpoint_files(replace(checkpoint, config={**checkpoint.config, **tokens}), recipe)
    return {**files, "generation_config.json": json.dumps(_GENERATION, indent=1).encode()}


def _laid_out(made: Training, part: str) -> tuple[Recipe, Part]:
    """As the draft's family lays it out; the target is the same in each."""
    plan = made.plans["eagle" if part == "target" else part]
    draft = {} if part == "target" else plan.checkpoint(made.weights[part])
    target, drafted = family_of(plan.recipe).checkpoint(plan.recipe, made.weights["target"], draft)
    return plan.recipe, target if part == "target" else drafted
