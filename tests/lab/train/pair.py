"""A whole pair: trained, measured, written into a folder, and found again in the cache."""

import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import alone, cache_folder, installed_version
from eagletwin.harness.deserved.draft import DraftModel, States, check_device
from eagletwin.harness.deserved.follow import follow_chains, follow_last_fed
from eagletwin.harness.deserved.rounds import walk
from eagletwin.harness.families import family_of
from eagletwin.harness.families.recipe import Part, Recipe
from eagletwin.harness.families.store import checkpoint_files
from eagletwin.reference.eagle import Head
from eagletwin.reference.llama import target_rows

from .settings import BEGIN, END, PairSettings
from .text import Corpus, frequent_tokens, prompts, spread_windows, standard_library
from .training import DraftPlan, Weights, draft_plans, train_draft, train_target

# How many tokens a round commits, by the reference alone: the target is greedy, and so are its drafts.
#
# The prompts are held-out text. What the target says to a prompt is found first, one token at a time; it is then followed as
# any text is (follow.py, follow.py), so nothing depends on how an engine batches or stores anything.


@dataclass(frozen=True, slots=True)
class AcceptLengths:
    """Over `rounds` rounds: accept_length, tokens committed a round, the bonus token counted; accepted[j - 1], the share of
    rounds whose first j drafts are all accepted. The first is one more than the sum of the second."""

    rounds: int
    accept_length: float
    accepted: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """A prompt of `size` tokens and what the target says to it: tokens [T] x[0..T-1], all that verification commits."""

    size: int
    tokens: Tensor


def replies(settings: PairSettings, target: Weights, held_out: Tensor) -> list[Reply]:
    """Greedy replies to held-out prompts, in float64, with as many tokens to spare as a round's drafts look ahead."""
    found = []
    for prompt in spread_windows(held_out, settings.prompts, settings.prompt_size):
        tokens = prompt
        for _ in range(settings.new_tokens + settings.num_steps + 1):
            tokens = torch.cat([tokens, target_rows(target, settings.target, tokens).logits[-1:].argmax(-1)])
        found.append(Reply(len(prompt), tokens))
    return found


def draft_of_recipe(recipe: Recipe, heads: Sequence[Head]) -> DraftModel:
    """The draft of a recipe, of which its family has made the heads."""
    reads: States = recipe.target.aux_layers or ("pre_norm" if recipe.target.pre_norm else "post_norm")
    return DraftModel("MTP" if recipe.mtp_layers else recipe.algorithm, tuple(heads), reads, recipe.chained)


def accept_lengths(
    settings: PairSettings, plan: DraftPlan, draft: Weights, target: Weights, said: Sequence[Reply]
) -> AcceptLengths:
    """Rounds that commit `new_tokens` tokens of each reply. Weights are float64."""
    model = draft_of_recipe(plan.recipe, plan.heads(draft, target))
    found: list[int] = []
    for reply in said:
        tokens, hidden = reply.tokens.tolist(), target_rows(target, plan.recipe.target, reply.tokens).hidden
        if model.layers:
            followed = follow_last_fed(model, tokens, hidden, reply.size, settings.num_steps, 0.0, None)
        else:
            followed = follow_chains(model, tokens, hidden, settings.num_steps, 0.0)
        walked, end = walk(followed, reply.size), reply.size + settings.new_tokens
        found += [count for start, count in zip(walked.starts, walked.accepted, strict=True) if start < end]
    steps = range(1, settings.num_steps + 1)
    shares = tuple(sum(accepted >= step for accepted in found) / len(found) for step in steps)
    return AcceptLengths(len(found), 1 + sum(shares), shares)


# A whole pair: trained, measured, and written into a folder.
#
# * `target/`, `eagle/`, `eagle3/`, `mtp/` are checkpoints as SGLang and transformers read them: config.json,
#   generation_config.json, model.safetensors.
# * `prompts.jsonl` has prompts that no model was trained on, as `eagletwin acceptance --prompts` reads them.
# * `pair.json` says what the pair was made of, how good it is, how long it took, and the digest of every file.

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


# Where a pair lies: in the cache, made once, or in a folder that somebody names.
#
# A pair is written to a temporary folder, which is renamed when it is whole. Processes that ask the cache for the same pair at
# once wait for the first of them.


def cached_pair(settings: PairSettings, device: str, say: Callable[[str], None]) -> Path:
    """The folder of a pair in the cache, trained first unless it is there and whole.

    device: `cpu` or `cuda`, where it is trained; a pair that is there may come from the other.
    Raises InputError for a GPU that is missing, HarnessError if transformers is.
    """
    corpus = standard_library()
    parent = cache_folder("trained")
    folder = parent / f"{settings.name}-{settings.digest(corpus.digest)[:16]}"
    if is_whole(folder):
        return folder
    check_device(device)
    with alone(parent / f".{folder.name}.lock", lambda: say("another process is making this pair: waiting for it")):
        if is_whole(folder):  # by the process that was waited for
            return folder
        partial = parent / f".{folder.name}.partial"
        for leftover in (partial, folder):  # of a process that was killed; damaged
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        try:
            make_pair(settings, corpus, device, partial, say)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def new_pair(settings: PairSettings, device: str, folder: Path, say: Callable[[str], None]) -> Path:
    """Train a pair into a folder that is empty or absent. Raises InputError for any other, and as cached_pair does."""
    check_device(device)
    folder = folder.absolute()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(
                f"{folder} is not empty",
                consequence="nothing was trained or overwritten",
                remedy="name an empty folder, or none: the pair then goes to the cache",
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".partial-"))
    except OSError as error:
        raise InputError(
            f"{folder}: {error.strerror}", consequence="nothing was trained", remedy="name a folder that you may write"
        ) from error
    try:
        make_pair(settings, standard_library(), device, partial, say)
        partial.chmod(0o755)  # a temporary folder is its owner's alone
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a pair with every file as it was written."""
    try:
        files = json.loads((folder / FACTS).read_bytes())["files"]
        parts = {name.partition("/")[0] for name in files}
        return parts == {*PARTS, PROMPTS} and all(
            hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in files.items()
        )
    except (OSError, ValueError, KeyError):
        return False
