"""Each mistake of configuration, planted: the rounds of a server that makes it name it. A healthy pair gets no warning."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagletwin.harness.deserved.conditions import Seen
from eagletwin.harness.deserved.draft import States
from eagletwin.harness.deserved.follow import Shape
from eagletwin.harness.deserved.misconfiguration import LEAST_TEXTS, better_read_as, explained_by, is_clearly_more, mistakes
from eagletwin.harness.deserved.precision import Pair, load_pair
from eagletwin.harness.deserved.rounds import compare
from eagletwin.harness.deserved.server import Answer, Sent
from eagletwin.harness.deserved.statistics import Text
from eagletwin.harness.deserved.target import Read
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.store import checkpoints

from ..rows import spread

pytestmark = pytest.mark.slow  # transformers is imported

SHAPE = Shape(3, 1, 4)
READ_BY_TRANSFORMERS = ("llama-tiny", "llama-gqa", "llama-eagle3", "llama-eagle3-full", "llama-mtp", "llama-mtp-chain")


@lru_cache
def pair_of(model: str) -> Pair:
    target, draft = map(str, checkpoints(model))
    return load_pair(target, draft, "float32", "cpu")


def texts_of(pair: Pair, count: int = 7) -> list[tuple[list[int], int]]:
    generator, size = torch.Generator().manual_seed(2), len(pair.target.shared.embedding)
    prompts = [torch.randint(0, size - 1, (3 + n,), generator=generator).tolist() for n in range(count)]
    texts = [([*prompt, *pair.target.greedy(prompt, 24)], len(prompt)) for prompt in prompts]
    return [(tokens, begin) for tokens, begin in texts if len(tokens) > begin + 1]  # the others end at once


def served_by(pair: Pair, mistaken: Pair, texts: Sequence[tuple[list[int], int]]) -> list[Seen]:
    """What a server says that drafts as `mistaken` does, beside what the pair deserves."""
    seen = []
    for number, (tokens, begin) in enumerate(texts):
        followed = mistaken.follow(tokens, mistaken.read(tokens).hidden, SHAPE)
        layout = mistaken.follow_layout(tokens, mistaken.read(tokens).hidden, SHAPE, begin) or followed
        starts, committed = [], begin
        while committed < len(tokens) - 1:
            starts.append(committed)
            committed += layout.accepted(committed) + 1
        answer = Answer(
            prompt=tuple(tokens[:begin]),
            tokens=tuple(tokens[begin:]),
            rounds=len(starts),
            starts=tuple(starts),
            accepted=None,
            cached=0,
            finish="length",
        )
        seen.append(Seen(Sent(number, "alone", answer), compare(pair, SHAPE, answer, pair.read(tokens))))
    return seen


def planted(pair: Pair, name: str) -> list[str]:
    """The mistakes that are named where a server makes this one."""
    [mistake] = [one for one in mistakes(pair.draft, pair.of_draft, pair.of_target, pair.target.shared) if one.name == name]
    seen = served_by(pair, replace(pair, draft=mistake.draft), texts_of(pair))
    assert not all(one.compared.equal for one in seen), "the mistake changes no round here"
    return [one.name for one in explained_by(pair, SHAPE, seen)]


@pytest.mark.parametrize(
    ("model", "name"),
    spread(
        [
            ("llama-eagle3", "aux-layers+1"),
            ("llama-eagle3", "aux-layers-default"),
            ("llama-eagle3", "norm-output"),
            ("llama-eagle3", "d2t-missing"),
            ("llama-eagle3", "d2t-absolute"),
            ("llama-eagle3", "d2t-shifted"),
            ("llama-gqa", "hidden-state"),
            ("llama-gqa", "dtype-8"),
            ("llama-mtp", "mtp-layers"),
            ("llama-mtp", "mtp-chained"),
            ("llama-mtp-chain", "mtp-chained"),
        ],
        lambda row: row[1].partition("-")[0],
    ),
)
def test_a_server_that_makes_a_mistake_betrays_it_and_no_other(model: str, name: str) -> None:
    named = planted(pair_of(model), name)
    assert name in named
    assert named == [name] or (
        name.startswith("d2t") and all(one.startswith("d2t") for one in named)
    )  # nothing is accepted at all


Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def changed(tmp_path: Path, model: str, change: Change) -> Pair:
    """The pair with another configuration and other tensors of the draft: what it was trained with, then."""
    target, draft = checkpoints(model)
    folder = tmp_path / "draft"
    shutil.copytree(draft, folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return load_pair(str(target), str(folder), "float32", "cpu")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(8))


def norms_before_fc(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["norm_before_fc"] = True
    tensors["input_norm.weight"] = normal(tensors["fc.weight"].shape[1]).exp()


def has_an_embedding(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["embed_tokens.weight"] = normal(config["vocab_size"], config["hidden_size"])


def another_theta(config: dict[str, Any], _: dict[str, Tensor]) -> None:
    config["rope_theta"] = 37.0


def another_scaling(config: dict[str, Any], _: dict[str, Tensor]) -> None:
    config["rope_scaling"] = {"rope_type": "linear", "factor": 16.0}


@pytest.mark.parametrize(
    ("model", "change", "name"),
    spread(
        [
            ("llama-eagle3", norms_before_fc, "norm-before-fc"),
            ("llama-gqa", has_an_embedding, "embedding"),
            ("llama-gqa", another_theta, "rope"),
            ("llama-gqa", another_scaling, "rope-scaling"),
        ],
        lambda row: row[0],
    ),
)
def test_what_a_checkpoint_says_and_a_server_ignores_is_named(tmp_path: Path, model: str, change: Change, name: str) -> None:
    named = planted(changed(tmp_path, model, change), name)
    assert name in named
    assert set(named) <= {"rope", "rope-theta", "rope-scaling"} or named == [name]  # the target's is the default


@pytest.mark.parametrize("model", spread(READ_BY_TRANSFORMERS, lambda model: "eagle3" in model, lambda model: "mtp" in model))
def test_a_healthy_pair_gets_no_warning(model: str) -> None:
    pair = pair_of(model)
    texts = [Text(tokens, begin, pair.follow(tokens, pair.read(tokens).hidden, SHAPE)) for tokens, begin in texts_of(pair)]
    assert better_read_as(pair, SHAPE, texts) == []
    assert explained_by(pair, SHAPE, served_by(pair, pair, texts_of(pair, 4))) == []


def test_the_target_reads_a_text_once_for_all_mistakes_that_consume_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, read = pair_of("llama-eagle3"), list[States]()
    [(tokens, begin)] = texts_of(pair, 1)
    text = Text(tokens, begin, pair.follow(tokens, pair.read(tokens).hidden, SHAPE))
    whole = pair.target.read

    def counted(tokens: Sequence[int], reads: States) -> Read:
        read.append(reads)
        return whole(tokens, reads)

    monkeypatch.setattr(pair.target, "read", counted)
    better_read_as(pair, SHAPE, [text] * LEAST_TEXTS)
    assert len(read) == LEAST_TEXTS * len(set(read)) > LEAST_TEXTS
    read.clear()
    assert better_read_as(pair, SHAPE, [text]) == []
    assert not read  # too few to tell: nothing is computed


def test_more_is_clear_if_it_is_more_in_nearly_every_text() -> None:
    assert is_clearly_more([0.5, 0.6, 0.4, 0.5], [1.0, 1.1, 0.9, 1.01])
    assert not is_clearly_more([0.5, 0.6, 0.4, 0.5], [0.52, 0.62, 0.42, 0.52])  # too little
    assert not is_clearly_more([0.5, 0.6, 0.4, 0.5], [2.5, 0.6, 0.4, 0.1])  # one text
    assert not is_clearly_more([0.5], [1.5])
    assert set(RECIPES) >= set(READ_BY_TRANSFORMERS)
