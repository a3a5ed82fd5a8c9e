"""DeepSeek-V3.2 with its NextN layer: DeepSeek-V3 whose rows attend to a few chosen rows (DeepSeek Sparse Attention, DSA).

SGLang's own classes serve both, on its backend for DSA. Conventions, with their outside sources, are in
docs/explanation/latent-attention.md.
"""

from dataclasses import replace
from types import MappingProxyType

from eagletwin.reference.sizes import IndexShape

from . import deepseek
from .recipe import Family, Normal, Part, Recipe, Weights

PAGE = 64  # of SGLang's pool of such rows
CHOSEN_AT_ONCE = 128  # FlashMLA's prefill takes a multiple of so many chosen rows


def _recipe(name: str, plain: Recipe, index: IndexShape) -> Recipe:
    target, draft = (replace(shape, index=index) for shape in (plain.target, plain.draft))
    return replace(plain, name=name, family="deepseek_dsa", target=target, draft=draft, page=PAGE)


# Keys as wide as SGLang's pool takes them. Few rows are chosen, so that a short prompt leaves some out.
RECIPES = (
    _recipe("deepseek-dsa", deepseek.RECIPES[0], IndexShape(heads=4, width=128, chosen=8)),
    # sizes that the kernels of a GPU take: DeepGEMM's index scores are of 32 heads or 64
    _recipe("deepseek-dsa-wide", deepseek.RECIPES[2], IndexShape(heads=32, width=128, chosen=CHOSEN_AT_ONCE)),
)


def index_of(recipe: Recipe) -> IndexShape:
    """Sizes of its indexer."""
    if recipe.target.index is None:
        raise ValueError("a target of this family has an indexer")
    return recipe.target.index


def layer_weights(recipe: Recipe, number: int, normal: Normal) -> Weights:
    """A layer of DeepSeek-V3 with an indexer, whose scores have a std of about one."""
    latent, _ = deepseek.parts_of(recipe.target)
    index, size = index_of(recipe), recipe.target.hidden_size
    width = index.width
    indexer = {
        "wq_b.weight": normal(index.heads * width, latent.query_rank, std=latent.query_rank**-0.5),
        "wk.weight": normal(width, size, std=size**-0.5),
        "k_norm.weight": 1 + normal(width, std=0.1),
        "k_norm.bias": normal(width, std=0.1),
        "weights_proj.weight": normal(index.heads, size, std=size**-0.5),
    }
    own = {f"self_attn.indexer.{name}": tensor for name, tensor in indexer.items()}
    return deepseek.layer_weights(recipe, number, normal) | own


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """DeepSeek-V3's, by the name of DeepSeek-V3.2's class and with the indexer's sizes."""
    sizes = index_of(recipe)
    index = {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_n_heads": sizes.heads,
        "index_head_dim": sizes.width,
        "index_topk": sizes.chosen,
    }
    served, drafts = (replace(part, config={**part.config, **index}) for part in deepseek.checkpoint(recipe, target, draft))
    return served, drafts


FAMILY = Family(
    name="deepseek_dsa",
    recipes=RECIPES,
    asked_for=True,  # dsa-draft-reads
    draft_weights=deepseek.FAMILY.draft_weights,
    heads=deepseek.FAMILY.heads,
    checkpoint=checkpoint,
    # SGLang's own kernel of the choice knows 2,048 rows alone; torch's takes any number
    arguments=lambda recipe: {"dsa_topk_backend": "torch", "speculative_dsa_topk_backend": "torch"},
    environment=MappingProxyType({"SGLANG_DSA_FUSE_TOPK": "0"}),
    layer_weights=layer_weights,
    modules=deepseek.FAMILY.modules,
    stored="latent rows",
    limits=("no FP8 but in the indexer", "routed and shared experts are not fused"),
)
