"""Live, found by eagletwin on a GPU: the mask of a grammar is laid over the wrong places of float32 logits.

SGLang pads the vocabulary of a head to a multiple of 64, and cuts logits to the vocabulary's own size: rows of the cut logits
are as far apart as before. The kernel that applies a mask takes the vocabulary's size for that distance. So the mask of row 1
falls into the padding of row 0 and onto other tokens of row 1, and row 1 may get tokens that its grammar does not allow.
Logits of 16 bits are copied as they become float32, and a copy has no gaps. docs/findings/grammar-stride.md.
"""

from ..entry import Entry, Grammar, Needs, Request, small_case, small_patch

BY_DISTANCE = small_patch(
    "masks-by-the-distance-of-rows",
    "sglang.kernels.ops.grammar.bitmask_ops.apply_token_bitmask_inplace_triton",
    "logits_shape[1],\n        bitmask_shape[1],\n        NUM_SMS",
    """# Logits cut to the vocabulary are a view of padded ones: their rows are
# farther apart than the vocabulary is long.
logits.stride(0) if logits.ndim > 1 else logits_shape[1],
bitmask_shape[1],
NUM_SMS""",
)

ENTRY = Entry(
    id="grammar-stride",
    title="Apply the mask of a grammar by the distance between rows of logits",
    rule="output.grammar",
    buggy="0.5.23 -",
    trigger="a GPU, logits in float32, a vocabulary that is no multiple of 64, a batch of two requests with grammars",
    needs=Needs(device="cuda", dtype="float32"),
    remedy=BY_DISTANCE,
    case=small_case(
        Request(id="a", prompt=(15,), max_new_tokens=1, grammar=Grammar(kind="regex", rules=("a",))),
        Request(id="b", prompt=(15,), max_new_tokens=1, grammar=Grammar(kind="regex", rules=("(b)?",))),
        num_steps=2,
    ),
)
