"""What the judge knows of a model beside its numbers: by its recipe, or as a recording says it."""

from dataclasses import dataclass, replace
from functools import lru_cache

from eagletwin.harness.core.records import Header, ServedModel
from eagletwin.harness.core.verdict import DECLARED_VIEW, View
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.recipe import draft_parts
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.sizes import LlamaShape


@dataclass(frozen=True, slots=True)
class Model:
    """A model, for the rules that need none of its weights.

    ends        end-of-sequence tokens
    mtp_layers  layers of a multi-layer draft; 0: a single head
    drafts      what the draft's KV pools are called in a trace, by layer
    proposes    the target's token of each id of the draft's vocabulary. A recording has the target's ids already
    numbers     whether the reference can compute its numbers
    states      whether hidden states are handed to the draft, and from one of its steps to the next
    ahead       row i of the draft must consume x[i + ahead]
    latent      where in each stored row the latent vector, the turned key and the key of an indexer, if there is one, end;
                empty: keys and values are stored
    chosen      how many rows a row attends to, where an indexer chooses them
    windows     whether some layers have a window, and their rows slots of the window's own
    memory      whether the draft has rows of its own; else it reads the target's, and a round's forwards stand at one place
    keeping     how many layers keep a state in place of rows
    ratios      of each layer, of how many rows a compressed row is made; 0: there is none
    """

    vocab_size: int
    ends: frozenset[int]
    mtp_layers: int
    drafts: tuple[str, ...]
    proposes: range | list[int]
    numbers: bool
    states: bool = True
    ahead: int = 1
    latent: tuple[int, ...] = ()
    chosen: int = 0
    windows: bool = False
    memory: bool = True
    keeping: int = 0
    ratios: tuple[int, ...] = ()

    @property
    def first_step(self) -> int:
        """Of draft decode: 0 where it begins with the bonus token, which draft extend has run elsewhere."""
        return 1 if self.ahead and self.memory else 0


def model_of(header: Header, view: View = DECLARED_VIEW) -> Model:
    """The model of a trace or a recording, and what it is held to in this view."""
    served = header.served
    if isinstance(served, ServedModel):
        layers, vocabulary = served.mtp_layers, range(served.vocab_size)
        ends, parts, states = frozenset(served.ends), draft_parts(layers), served.states
        model = Model(served.vocab_size, ends, layers, parts, vocabulary, numbers=False, states=states, ahead=int(states))
    else:
        model = _of_recipe(header.case.model)
    return replace(model, ahead=1) if view == "shifted" else model


def _ends_of_stored(shape: LlamaShape) -> tuple[int, ...]:
    latent, index, compressed = shape.latent, shape.index, shape.compressed
    if compressed is not None:
        width, plain = shape.head_dim, shape.head_dim - compressed.rope
        return (plain, width, width + plain, 2 * width, 2 * width + compressed.index_width)
    if latent is None:
        return ()
    return (latent.rank, latent.width, *(() if index is None else (latent.width + index.width,)))


@lru_cache(maxsize=16)  # asked for at every record
def _of_recipe(name: str) -> Model:
    recipe = RECIPES[name]
    return Model(
        recipe.target.vocab_size,
        frozenset({recipe.end_of_sequence}),
        recipe.mtp_layers,
        recipe.drafts,
        model_pair(recipe.name).proposes.tolist(),  # by the recipe, whatever the engine loaded
        numbers=True,
        states=recipe.reads_states,
        ahead=1 if recipe.reads_states else 0,
        latent=_ends_of_stored(recipe.target),
        chosen=0 if recipe.target.index is None else recipe.target.index.chosen,
        windows=recipe.window > 0,
        memory=not recipe.frozen,
        keeping=recipe.target.states,
        ratios=() if recipe.target.compressed is None else recipe.target.compressed.ratios,
    )
