"""The numbers of an EAGLE-3 draft head that agrees with its target at some steps and not at others.

The token that a row consumes reaches the residual sum through attention alone. A trained head learns to pass it on, and this
one is made to: a row attends mostly to itself; its value is the token's embedding, less most of the hidden state, which the
residual sum has from the start and would otherwise pile up from one draft step to the next. Then follow the MLP of the
target's last layer, the final norm and the rows of the LM head, each with noise.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .recipes import Recipe

# Scores of a row with itself of 4 * SELF**2 = 13 at heads of 16, and with others of a standard deviation a quarter of that:
# most of the attention is a row's own, and the rest is context.
SELF = 1.8
# Share of the hidden state in queries, keys and the residual sum: enough for a wrong one to show in every number, and so
# little that the token still decides.
CONTEXT = 0.06
# A vocabulary is reduced to the tokens that a target often emits: this one emits them more often than others.
HOT = 1.4


def proposed(recipe: Recipe, normal: Callable[..., Tensor]) -> Tensor:
    """The tokens of the draft's vocabulary [N]: drawn, and so in no order, which makes d2t go up and down."""
    drawn = normal(recipe.target.vocab_size, std=1.0).argsort()
    return drawn[: recipe.draft_vocab_size]


def draft_weights(
    recipe: Recipe, target: dict[str, Tensor], proposes: Tensor, normal: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Tensors by the names of an EAGLE-3 checkpoint. normal(*shape, std) draws; float32, and d2t int64."""
    shape, size = recipe.draft, recipe.draft.hidden_size
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if heads != size or kv_heads != size:
        raise ValueError(f"{recipe.name}: an embedding passes through attention only if heads are as wide as the state")

    def noisy(tensor: Tensor) -> Tensor:
        return tensor + normal(*tensor.shape, std=recipe.noise * float(tensor.std()))

    def reads(token: float, state: float) -> Tensor:
        """[size, 2 * size]: the embedding times `token`, the hidden state times `state`, and some mixture of the latter."""
        context = normal(size, size, std=CONTEXT * size**-0.5)
        return torch.cat([noisy(token * torch.eye(size)), state * torch.eye(size) + context], 1)

    last = f"model.layers.{recipe.target.num_layers - 1}."
    width = len(recipe.target.aux_layers) * size
    draft = {
        "fc.weight": normal(size, width, std=width**-0.5),
        "midlayer.input_layernorm.weight": 1 + normal(size, std=recipe.noise),
        "midlayer.hidden_norm.weight": 1 + normal(size, std=recipe.noise),
        "midlayer.self_attn.q_proj.weight": reads(SELF, 0.0),
        "midlayer.self_attn.k_proj.weight": reads(SELF, 0.0),
        "midlayer.self_attn.v_proj.weight": reads(1.0, CONTEXT - 1),
        "midlayer.self_attn.o_proj.weight": noisy(torch.eye(size)),
        "norm.weight": noisy(target["model.norm.weight"]),
    }
    for name in ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        draft[f"midlayer.{name}.weight"] = noisy(target[f"{last}{name}.weight"])
    if recipe.draft_vocab_size is not None:
        draft["d2t"] = proposes - torch.arange(len(proposes))
    draft["lm_head.weight"] = noisy(target["lm_head.weight"][proposes])
    # As far as an argmax goes, a norm whose weights are all about 1 might as well not be there: these are 1/4 to 4, and the
    # LM head takes it back.
    spread = normal(size, std=0.7).exp()
    draft["norm.weight"] *= spread
    draft["lm_head.weight"] /= spread
    return draft
