"""Live, found by eagletwin: a multi-layer draft consumes wrong tokens at the end of a prefill chunk that is not the last.

PR #26329 for several layers: at a chunk that ends at K the worker puts the target's argmax where layer 0 must consume x[K],
though the scheduler has handed it that token; a comment in the worker says so. And each layer's window is that of the layer
below, moved on by one, with what the layer below proposed at its end. So layer k has k + 1 wrong rows at each chunk's end:
K-1-k..K-1 must consume x[K..K+k]. The next chunk begins at K, so they stay wrong for as long as the request lives, and in the
prefix cache after it.

To give layer 0 its token is not enough: layer k needs x[K..K+k]. ONE_TOKEN is the fix of #26329 carried over; ALL_LAYERS looks
all of them up. Where the prompt ends inside the window the token is not known yet: the draft of the layer below stands in for
it, as at the end of the prompt, and the row is provisional (entry boundary-kv).
"""

from ..entry import Edit, Entry, Loses, Patch, Request, small_case

_WORKER = "sglang.srt.speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker._draft_extend_for_prefill"

# Before the layers run: what follows the chunk, as far as the prompt goes; after a retraction that is all there is. A chunk is
# empty where the tokens of requests that run fill a mixed one.
_LOOK_UP = """ahead, chunked = [], batch.chunked_req
row = next((n for n, req in enumerate(batch.reqs) if req is chunked), None)
if row is not None:
    known = [*chunked.origin_input_ids, *chunked.output_ids]
    end = chunked.extend_end if hasattr(chunked, "extend_end") else chunked.extend_range.end
    ahead = known[end : end + self.speculative_num_steps]
if ahead and forward_batch.extend_seq_lens_cpu[row] > 0:
    tail = forward_batch.extend_start_loc[row] + forward_batch.extend_seq_lens[row] - 1
    forward_batch.input_ids[tail] = ahead[0]
"""
_FIRST_LAYER = Edit(
    target=_WORKER, match="self._seed_boundary_kv_stash(", replacement=f"{_LOOK_UP}self._seed_boundary_kv_stash("
)
# Before the window is moved on for the next layer. What was proposed is kept as it was.
_NEXT_LAYERS = Edit(
    target=_WORKER,
    match="if forward_batch.extend_seq_lens is not None:",
    replacement="""if step + 1 < len(ahead):
    topk_index = topk_index.clone()
    topk_index[row] = ahead[step + 1]
if forward_batch.extend_seq_lens is not None:""",
)

ONE_TOKEN = Patch(name="one-tail-token", edits=(_FIRST_LAYER,))
ALL_LAYERS = Patch(name="tail-tokens-of-all-layers", edits=(_FIRST_LAYER, _NEXT_LAYERS))


def _entry(layers: int, model: str, prompt: tuple[int, ...], chunk: int) -> Entry:
    return Entry(
        id=f"multi-layer-chunk-tail-{layers}",
        title=f"Give each of {layers} layers the tokens that follow the chunk",
        rule="draft.input_ids",
        buggy="0.5.9 -",
        trigger="multi-layer EAGLE, and a prompt in two chunks or more that goes on otherwise than predicted",
        loses=Loses("prompts longer than a chunk", layers=True, num_steps=layers),
        remedy=ALL_LAYERS,
        case=small_case(
            Request(id="a", prompt=prompt, max_new_tokens=2),
            model=model,
            num_steps=layers,
            chunked_prefill_size=chunk,
            exercises=("chunked_prefill", "chunk_tail_differs"),
        ),
    )


TWO = _entry(2, "llama-mtp", (7, 19, 3, 5), 2)
THREE = _entry(3, "llama-mtp-chain", (7, 19, 3, 5, 11, 2), 3)

ENTRIES = (TWO, THREE)
