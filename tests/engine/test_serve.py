"""SGLang's own HTTP server on a CPU: it uses the rounds that its texts deserve, with everything on that a server has.

One process imports SGLang and its front end, 8 s on an idle machine; a server forked from it answers within a second.
"""

import json
import random
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from eagletwin.cases.ledger import patches_of
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.deserved.statistics import MOST_DEVIATIONS, Expected, chances, expected_rounds
from eagletwin.harness.engines.host import PatchDoesNotApply, WouldNotStart
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.store import checkpoints
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.llama import target_rows

from ..lab.servers import Server, Servers
from ..lab.serving.messages import Serve
from ..rows import long
from .deserved import rounds_deserved
from .older import zygote_of

pytestmark = pytest.mark.slow

LENGTHS = (5, 9, 20, 40, 63, 64, 65, 100, 150, 200, 300, 33)
# Rounds that a server on an H200 used for these prompts, with CUDA graphs and overlap: SGLang 0.5.23, float32.
ON_A_GPU = [21, 20, 18, 22, 27, 16, 28, 17, 29, 16, 16, 17]


def asked(model: str, **how: Any) -> Serve:
    target, draft = checkpoints(model)
    return Serve(target=str(target), draft=str(draft), model=model, **how)


def prompts(model: str, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """The same at each call: the beginnings are what those of another call begin with, too."""
    draw, end = random.Random(3), min(120, RECIPES[model].end_of_sequence - 2)
    return [[draw.randrange(3, end) for _ in range(length)] for length in lengths]


def answer(server: Server, prompt: list[int], new: int = 24, **sampling: object) -> Any:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True, **sampling}}
    request = urllib.request.Request(f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def answers(server: Server, those: list[list[int]], new: int = 24) -> list[Any]:
    return [answer(server, prompt, new) for prompt in those]


def used(found: list[Any]) -> list[int]:
    return [one["meta_info"]["spec_verify_ct"] for one in found]


def deserved(
    model: str, those: list[list[int]], found: list[Any], num_steps: int = 3, topk: int = 1, nodes: int = 0
) -> list[int]:
    both = [
        rounds_deserved(model, prompt, one["output_ids"], num_steps, topk, nodes)
        for prompt, one in zip(those, found, strict=True)
    ]
    assert all(greedy for _, greedy in both)
    return [rounds for rounds, _ in both]


@pytest.mark.long
def test_a_server_uses_the_rounds_that_its_texts_deserve_alone_and_together(servers: Servers) -> None:
    """Chunks; then, all at once, prefixes that the first round of requests left in the cache."""
    those = prompts("llama-gqa")
    with servers.start(asked("llama-gqa", chunked_prefill_size=64)) as server:
        alone = answers(server, those, 48)
        with ThreadPoolExecutor(len(those)) as at_once:
            together = list(at_once.map(lambda prompt: answer(server, prompt, 48), those))
    assert used(alone) == deserved("llama-gqa", those, alone) == ON_A_GPU
    assert used(together) == ON_A_GPU
    assert [one["output_ids"] for one in alone] == [one["output_ids"] for one in together]
    assert all(one["meta_info"]["cached_tokens"] > len(prompt) // 2 for one, prompt in zip(together, those, strict=True))
    for one in alone:
        meta = one["meta_info"]
        counts = meta["spec_correct_drafts_histogram"]
        assert sum(counts) == meta["spec_verify_ct"]
        assert sum(accepted * count for accepted, count in enumerate(counts)) == meta["spec_num_correct_drafts"]


@pytest.mark.parametrize(
    ("model", "how", "nodes"),
    [
        ("llama-eagle3", {"chunked_prefill_size": 16}, 0),
        *long(
            ("llama-gqa", {"topk": 3, "num_steps": 4, "num_draft_tokens": 12, "chunked_prefill_size": 64, "page_size": 4}, 12),
            ("llama-mtp", {}, 0),
            ("llama-mtp-chain", {}, 0),
            ("llama-tiny", {"mode": Mode(overlap=True), "chunked_prefill_size": 16}, 0),
        ),
    ],
)
def test_so_do_trees_in_pages_and_other_drafts(servers: Servers, model: str, how: dict[str, Any], nodes: int) -> None:
    those = prompts(model, (5, 20, 40, 65, 9))
    with servers.start(asked(model, **how)) as server:
        found = answers(server, those)
    assert used(found) == deserved(model, those, found, how.get("num_steps", 3), how.get("topk", 1), nodes)


@pytest.mark.long
def test_a_fix_that_is_undone_shows_in_the_rounds(servers: Servers) -> None:
    model, those = "llama-eagle3-full", prompts("llama-eagle3-full", LENGTHS[:4])
    rounds = {}
    for number in ("25015", "26329"):
        patches = patches_of([number], None, None)
        with servers.start(asked(model, chunked_prefill_size=2, patches=patches)) as server:
            found = answers(server, those, 32)
            assert "ran, as patched" in server.log.read_text()
        right = deserved(model, those, found)
        assert used(found) != right
        rounds[number] = sum(used(found)) - sum(right)
    assert all(more > 0 for more in rounds.values()), rounds
    with servers.start(asked(model, chunked_prefill_size=2)) as server:
        found = answers(server, those, 32)
    assert used(found) == deserved(model, those, found)


@pytest.mark.long
@pytest.mark.parametrize(("release", "more"), [("0.5.12.post1", 3), ("0.5.13", 0)])
def test_a_release_with_a_bug_uses_more_rounds_than_the_one_that_fixed_it(release: str, more: int) -> None:
    """#26329, fixed in 0.5.13, on wheels in which nothing was changed for it."""
    those = prompts("llama-tiny", (5, 20, 40, 65))
    how = asked("llama-tiny", chunked_prefill_size=16)
    with zygote_of(release) as zygote, Servers(zygote) as servers, servers.start(how) as server:
        found = answers(server, those)
    assert sum(used(found)) == sum(deserved("llama-tiny", those, found)) + more


@pytest.mark.long
def test_requests_that_sample_are_sampled_and_the_same_again(servers: Servers) -> None:
    prompt = prompts("llama-tiny", (9,))[0]
    texts = []
    for _ in range(2):
        with servers.start(asked("llama-tiny")) as server:
            texts.append([answer(server, prompt, temperature=temperature)["output_ids"] for temperature in (0, 1.5)])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


class _Draft:
    """As DraftModel, of a recipe's head."""

    algorithm = "EAGLE"

    def __init__(self, model: str) -> None:
        self.heads = (model_pair(model).reference_heads(RECIPES[model])[0],)


@pytest.mark.long
def test_rejection_sampling_takes_the_rounds_that_are_expected_of_its_texts(servers: Servers) -> None:
    """Seeds are fixed, so the test is the same each time: one right server in 16,000 is further off than 4 deviations."""
    model, those, temperature = "llama-gqa", prompts("llama-gqa"), 1.3
    with servers.start(asked(model, more=("--speculative-use-rejection-sampling",))) as server:
        found = [answer(server, prompt, 48, temperature=temperature) for prompt in those * 2]
    whole = Expected(0, 0)
    for prompt, one in zip(those * 2, found, strict=True):
        tokens = torch.tensor([*prompt, *one["output_ids"]])
        rows = target_rows(model_pair(model).reference_target(), RECIPES[model].target, tokens)
        said = (rows.logits[:-1] / temperature).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        kept = chances(_Draft(model), tokens.tolist(), rows.hidden, said, 3, temperature)  # type: ignore[arg-type]
        whole += expected_rounds(kept, len(prompt))
    assert whole.variance > 10
    assert abs(whole.deviations(sum(used(found)))) < MOST_DEVIATIONS
    # what the rounds would be if the draft were not asked, or always right
    assert whole.deviations(len(found) * 47) > 10
    assert whole.deviations(len(found) * 12) < -10


def test_two_servers_run_side_by_side_and_neither_leaves_anything(servers: Servers) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with servers.start(asked("llama-tiny")) as one, servers.start(asked("llama-tiny", num_steps=1)) as other:
        assert one.url != other.url
        assert len(answer(one, [7, 8])["output_ids"]) == len(answer(other, [7, 8])["output_ids"]) == 24
        assert one.ended() is other.ended() is None
        among = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
        assert {"sglang::scheduler", "sglang::detokenizer"} <= {process.name() for process in among}
    _, left = psutil.wait_procs(among, timeout=60)
    assert not left
    with pytest.raises(urllib.error.URLError):
        answer(one, [7])


def test_a_server_that_cannot_be_says_why(servers: Servers) -> None:
    with pytest.raises(WouldNotStart, match="SGLang ended with exit status 2"):
        servers.start(asked("llama-tiny", more=("--no-such-argument",)))
    with pytest.raises(WouldNotStart, match="num_steps"):
        servers.start(asked("llama-mtp", num_steps=9))
    with pytest.raises(WouldNotStart, match="a server of 2 ranks"):
        servers.start(asked("llama-tiny", more=("--tp", "2")))
    nowhere = Patch(name="nowhere", edits=(Edit(target="sglang.srt.no_such.function", match="a", replacement="b"),))
    with pytest.raises(PatchDoesNotApply, match="does not exist"):
        servers.start(asked("llama-tiny", patches=(nowhere,)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(InputError, match="port"):
            servers.start(asked("llama-tiny", port=taken.getsockname()[1]))


def test_what_is_not_as_in_sglang_is_declared(servers: Servers) -> None:
    with servers.start(asked("llama-tiny")) as server:
        declared = "\n".join(server.shims)
    for part in ("_is_cpu = False", "forked, not spawned", "a store in its own memory", "sgl_kernel: a stub", "without a dump"):
        assert part in declared


def test_a_scheduler_that_fails_ends_the_server_with_its_exception(servers: Servers) -> None:
    target = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward"
    edit = Edit(target=target, match="hidden_states = logits_output.hidden_states", replacement="raise OSError('planted')")
    with servers.start(asked("llama-tiny", patches=(Patch(name="fails", edits=(edit,)),))) as server:
        with pytest.raises((urllib.error.URLError, OSError)):
            answer(server, [7, 8])
        assert server.ended(60) == "its scheduler failed: OSError: planted"
        assert "planted" in server.log.read_text()
