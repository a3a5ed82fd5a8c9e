"""Why a bug does not show in a model where nothing forbids it: what was found where the table was open."""

from eagletwin.harness.families import RECIPES

# entry -> of drafts of several layers
_LAYERS = {
    "8409": "a draft of several layers has no draft decode: no branch of its trees stores a row",
    "26997-bonus": "a tree of several layers has num_steps + 1 nodes, and with so many both strides are the same",
    "26329": "the worker of several layers has a chunk's tail elsewhere (multi-layer-chunk-tail)",
    "retracted-chunk-tail": "the worker of several layers looks up no tail (multi-layer-chunk-tail), and the "
    "remedy of that looks in what was emitted as well",
}
_NO_CHAIN = {"chain-hidden": "its layers all consume the target's state, and hand none on"}

_OWN_TOKEN = "a language model's row consumes its own token, and asks for none behind the chunk (standalone-shift)"
_NO_STATES = "beside a plain draft no state is given at all (hidden-standalone)"
_PLAIN_DRAFT = {
    "10846": "keys of single tokens, which it makes of pairs, are the right ones for a language model (standalone-keys)",
    "26329": _OWN_TOKEN,
    "retracted-chunk-tail": _OWN_TOKEN,
    "26997-hidden": "a language model as draft consumes no states of the target",
    "hidden-rows": _NO_STATES,
    "hidden-rows-2": _NO_STATES,
    "hidden-no-tokens": _NO_STATES,
    "session-hidden": _NO_STATES,
    "grammar-end": "its case ends with the prefill, and the remedy of standalone-shift changes a round, too, which never runs",
}
# Of a target whose windows are longer than any case of the ledger.
_NO_END = "no case of the ledger is as long as its windows of 72 rows, which must end for it"
_LONG_WINDOWS = {"tree-window": _NO_END, "deterministic-window": _NO_END, "decode-window": _NO_END}
_LONG = 72
_STATES = {
    "10846": "no prefix of fewer than 64 tokens is gone on from where layers keep states; longer ones show it as released, "
    "since keys are single tokens there (hybrid-keys)"
}

_NO_ROWS = "a draft that reads the target's rows has none of its own, no draft extend and no worker's draft decode but its own"
_FROZEN = dict.fromkeys(("10846", "25015", "26329", "8409", "indices-overflow", "retracted-chunk-tail"), _NO_ROWS) | {
    "grammar-end": "it does not show where batches overlap, and the worker of such a draft cannot be run otherwise (frozen-kv)"
}

# entry -> of a target with sliding windows, whatever their length
_WINDOWS = {
    "mixed-memory": "with windows SGLang has a prompt in chunks wait for slots: what would end a server elsewhere is late here",
}

# entry -> what the prompts that are tried do not reach, in any model but its own and these
_CHANCE = {
    "certain-node": "no prompt that is tried makes the draft certain of the last token that is selected",
    "overlap-context-end": "no prompt that is tried has a last round with enough accepted drafts to end behind its context",
    "guidance-rollback": "no prompt that is tried has a draft refused for a token behind which the same terminals may come",
}
_BY_CHANCE = {
    ("certain-node", "deepseek-nextn-wide"),
    ("overlap-context-end", "llama-wide"),
    ("overlap-context-end", "deepseek-nextn"),
    ("overlap-context-end", "deepseek-nextn-yarn"),
    ("overlap-context-end", "kimi-k2-eagle3"),
    ("overlap-context-end", "qwen3-eagle3"),
    ("overlap-context-end", "qwen3-eagle3-norm"),
    ("overlap-context-end", "qwen3-eagle3-deep"),
    ("overlap-context-end", "qwen3-next-nextn"),
    ("overlap-context-end", "nemotron-h-nextn"),
    ("overlap-context-end", "qwen3.5-nextn"),
    ("guidance-rollback", "llama-gqa"),
    ("guidance-rollback", "deepseek-nextn"),
    ("guidance-rollback", "deepseek-nextn-yarn"),
    ("guidance-rollback", "deepseek-nextn-wide"),
    ("guidance-rollback", "qwen3-eagle3.1"),
    ("guidance-rollback", "qwen3-next-nextn"),
    ("guidance-rollback", "qwen3.5-nextn"),
}

_BESIDE = (
    "equal with the fix and diverged without it, but the remedy of decode-window, which stands beside in this model, changes "
    "an eviction that so short a decode never comes to, and so the proof does not hold"
)

# (entry, model) -> what the prompts that are tried do not reach there, or what this model alone does otherwise
_NOT_REACHED = {
    ("retracted-logprobs", "gemma-4-assistant-window"): _BESIDE,
    ("retracted-stream", "gemma-4-assistant-window"): _BESIDE,
    (
        "host-layers",
        "mimo-v2-window",
    ): "its configuration has num_nextn_predict_layers, with which all of its layers are packed behind the target's",
    ("29354", "nemotron-h-nextn"): "a prefill of Mamba-2 that has no prefix reads no state, whatever its slot holds",
    ("pipeline-zeros", "llama-wide"): "no coin that is tried lies between one and two parts of token 0, which is rare there",
    ("guidance-end", "qwen3-eagle3"): "no prompt that is tried has the target send an end token where the text could go on",
    (
        "penalties",
        "qwen3-eagle3.1",
    ): "no prompt that is tried accepts a draft that would be the best token again; in the case of "
    "penalties-2, carried over, a later round does, and breaks verify.accept",
}


def reason(entry: str, model: str) -> str:
    """Why it does not show; empty: nobody knows."""
    recipe = RECIPES[model]
    if (entry, model) in _NOT_REACHED:
        return _NOT_REACHED[entry, model]
    if entry in _CHANCE and (entry, model) not in _BY_CHANCE:
        return _CHANCE[entry]
    if any(recipe.target.windows) and entry in _WINDOWS:
        return _WINDOWS[entry]
    if not recipe.reads_states:
        return _PLAIN_DRAFT.get(entry, "")
    if recipe.frozen and entry in _FROZEN:
        return _FROZEN[entry]
    if recipe.target.states:
        return _STATES.get(entry, "")
    if recipe.window == _LONG and entry in _LONG_WINDOWS:
        return _LONG_WINDOWS[entry]
    if not recipe.mtp_layers:
        return ""
    return _LAYERS.get(entry, "") or ("" if recipe.chained else _NO_CHAIN.get(entry, ""))
