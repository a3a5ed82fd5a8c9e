"""PR #22954: with several layers, which runner's pools and attention backend does the forward of a layer use?

The worker made one batch for all layers, and on it lay what runner 0 has: its `req_to_token_pool`, `token_to_kv_pool` and
`attn_backend`. The pull request put each layer's own `req_to_token_pool` on the batch, and its author asked whether the other
two need the same. They did: up to 0.5.12.post1 attention read both from the batch, and every layer wrote into layer 0's KV
pool (entry 22954-kv-pool). From 0.5.13 on the pools that the worker puts on a batch are never read: a forward asks the
context for its runner's attention backend, and that for both. To undo the fix there is to tie a layer's backend to layer 0's.

* `22954-req-pool`: what the pull request fixed. Runners of plain models share one object, which hides it, and those of a
  hybrid model have a clone each, which shares the table of slots; so the red side gives each its clone. No number differs:
  only what belongs to a clone, the state of hybrid layers, can be wrong.
* `22954-kv-pool`: a layer's rows go to layer 0's pool, over layer 0's.
* `22954-attn-backend`: the same, since the pools belong to the backend.
"""

from ..entry import Edit, Entry, Loses, Patch, Request, small_case

_DRAFTER = "sglang.srt.speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker"
_RUNNER = "self.draft_runner_list[step]"

# As SGLang does it for hybrid models: an object of its own for each layer, the table of slots shared.
OWN_REQ_POOLS = Edit(
    target=f"{_DRAFTER}.alloc_memory_pool",
    match="self.init_lm_head()",
    replacement="""import copy
for runner in self.draft_runner_list:
    runner.req_to_token_pool = copy.copy(req_to_token_pool)
self.init_lm_head()""",
)


def _tie_backend(name: str) -> Edit:
    """After a layer's backend is made: the attribute of it that is layer 0's again."""
    return Edit(
        target=f"{_DRAFTER}.init_attention_backend",
        match=f"translator = {_RUNNER}.kv_index_translator",
        replacement=f"""{_RUNNER}.attn_backend.{name} = self.draft_runner_list[0].{name}
translator = {_RUNNER}.kv_index_translator""",
    )


_BACKENDS = "self.draft_extend_attn_backend_list"


def _tied_before(name: str) -> Edit:
    """The same up to 0.5.21, whose backends know no translator: before the runner is given its backend."""
    return Edit(
        target=f"{_DRAFTER}.init_attention_backend",
        match=f"if {_BACKENDS}[-1] is not None:",
        replacement=f"{_BACKENDS}[-1].{name} = self.draft_runner_list[0].{name}\nif {_BACKENDS}[-1] is not None:",
    )


def _each(call: str) -> str:
    """A layer's own KV pool and backend on the batch, before the layer is called."""
    return f"""forward_batch.token_to_kv_pool = {_RUNNER}.token_to_kv_pool
forward_batch.attn_backend = {_RUNNER}.attn_backend
{call}"""


_PREFILL, _DECODE = f"output: ModelRunnerOutput = {_RUNNER}.forward(", f"draft_logits_output = {_RUNNER}.forward("

# The answer, for 0.5.9 to 0.5.12.post1: both on the batch, and each backend plans for it. The KV pool alone repairs every
# number; the backend without a plan of its own breaks some.
EACH_ITS_OWN = Patch(
    name="pools-and-backend-of-each-layer",
    edits=(
        Edit(target=f"{_DRAFTER}._draft_extend_for_prefill", match=_PREFILL, replacement=_each(_PREFILL)),
        Edit(target=f"{_DRAFTER}._draft_extend_for_decode", match=_DECODE, replacement=_each(_DECODE)),
        Edit(
            target=f"{_DRAFTER}._draft_extend_for_decode",
            match="forward_batch, skip_attn_backend_init=True",
            replacement="forward_batch",
        ),
    ),
)

_REVERTS = {
    "req-pool": (OWN_REQ_POOLS, _tie_backend("req_to_token_pool")),
    "kv-pool": (_tie_backend("token_to_kv_pool"),),
    "attn-backend": (
        Edit(
            target=f"{_DRAFTER}.init_attention_backend",
            match=f"translator = {_RUNNER}.kv_index_translator",
            replacement=f"""{_RUNNER}.attn_backend = self.draft_runner_list[0].attn_backend
translator = {_RUNNER}.kv_index_translator""",
        ),
    ),
}
_REVERTS_BEFORE = {
    "req-pool": (OWN_REQ_POOLS, _tied_before("req_to_token_pool")),
    "kv-pool": (_tied_before("token_to_kv_pool"),),
    "attn-backend": (
        Edit(target=f"{_DRAFTER}.init_attention_backend", match=f"{_BACKENDS}[-1]\n", replacement=f"{_BACKENDS}[0]\n"),
    ),
}


def _entry(part: str, what: str, buggy: str, fixed: str, trigger: str, last_bad: str = "", hidden: str = "") -> Entry:
    # a prefill shows it; from 0.5.13 to 0.5.15.post1 what comes after it is wrong for another reason (multi_layer.py)
    return Entry(
        id=f"22954-{part}",
        title=f"Have each layer of a multi-layer draft use its own runner's {what}",
        rule="draft.runner",
        buggy=buggy,
        fixed=fixed,
        last_bad=last_bad,
        hidden=hidden,
        trigger=trigger,
        loses=Loses("always", layers=True, num_steps=2),
        revert=Patch(name=f"revert-22954-{part}", edits=_REVERTS[part], otherwise=_REVERTS_BEFORE[part]),
        case=small_case(Request(id="a", prompt=(7,), max_new_tokens=1), model="llama-mtp", num_steps=2),
    )


_SEVERAL = "multi-layer EAGLE, num_steps >= 2"

ENTRIES = (
    _entry(
        "req-pool",
        "req_to_token_pool",
        "0.5.9 - 0.5.10.post1",
        "0.5.11",
        f"{_SEVERAL}, and runners with pools of their own: a hybrid model",
        hidden="the runners of a plain model share one object, and in these releases the KV pool is wrong before it shows",
    ),
    _entry("kv-pool", "token_to_kv_pool", "0.5.9 - 0.5.12.post1", "0.5.13", _SEVERAL, last_bad="0.5.12.post1"),
    _entry("attn-backend", "attn_backend", "0.5.9 - 0.5.12.post1", "0.5.13", _SEVERAL, last_bad="0.5.12.post1"),
)
