"""Sizes: of a Llama, of a draft tree, of the room that a round takes.

Plain integers and no tensor: cases are made and checked by these alone, before torch is imported."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How a context was lengthened after training: which pairs of a rotary embedding turn more slowly (layers.py).

    kind       all pairs alike (`linear`), or those that turn seldom within the original length (`llama3`, `yarn`)
    factor     how much more slowly
    original   positions that the model was first trained for
    seldom, often  turns within the original length: below the first a pair is slowed down, above the second it is not
    amplitude  cosines and sines are multiplied by it (`yarn`)
    temperature  the scores of attention are divided by it (latent attention, whose unturned part has no amplitude)
    truncate   `yarn`: the two limits lie at whole pairs
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original: int = 0
    seldom: float = 1.0
    often: float = 32.0
    amplitude: float = 1.0
    temperature: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Widths of multi-head latent attention (layers.py).

    query_rank  of the latent vector that queries are made of
    rank        of the one that keys and values are made of, which is stored
    rope        of the part of each query, and of the one key of all heads, that turns with its position
    plain       of the part of each query and key that does not
    value       of each head's value
    """

    query_rank: int
    rank: int
    rope: int
    plain: int
    value: int

    @property
    def width(self) -> int:
        """Of a stored row."""
        return self.rank + self.rope


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexShape:
    """Of latent attention that attends to a few chosen rows: what chooses them (layers.py).

    heads   of its queries
    width   of each, and of the one key of a row, which is stored behind its latent row
    chosen  rows that a row attends to, at most
    """

    heads: int
    width: int
    chosen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """A feed-forward layer of experts (experts.py).

    count   experts that a router chooses from, in `groups` groups of as many each
    chosen  experts of each row
    inner   width inside each of them, and inside the one that all rows share
    affinity  of an expert to a row: a sigmoid of its own logit, a root of its softplus, or a softmax over all experts
    shared  whether one more expert is added to every row
    kept    groups that the chosen experts may come from
    scale   what the routed experts' sum is multiplied by
    limit   where both parts of an expert are clamped, the gate from above alone; settled: biases or a table decide each choice
    """

    count: int
    chosen: int
    inner: int
    affinity: Literal["sigmoid", "softmax", "root_softplus"]
    shared: bool
    groups: int = 1
    kept: int = 1
    scale: float = 1.0
    limit: float = 0.0
    settled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedExperts:
    """A feed-forward layer of experts as gpt-oss has it (experts.py).

    count      experts that a router chooses from
    chosen     experts of each row
    inner      width inside each of them
    limit      where both parts of an expert are clamped
    steepness  of the sigmoid that gates
    """

    count: int
    chosen: int
    inner: int
    limit: float
    steepness: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Widths of a layer that keeps a state in place of rows: gated delta rule (state_layers.py).

    key_heads    heads of queries and keys; value_heads: of values and of the state, some of which share a key
    key, value   widths of a head
    kernel       inputs that the short convolution sees: those before it that are kept, and its own
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    kernel: int

    @property
    def mixed(self) -> int:
        """Channels of the convolution: queries, keys and values side by side."""
        return 2 * self.key_heads * self.key + self.value_heads * self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanShape:
    """Widths of a layer that keeps a state in place of rows: a selective state space (state_layers.py).

    heads, width  of the state, and of each
    groups   of heads, each of which is written and read along one direction
    state    width of a direction
    kernel   inputs that the short convolution sees: those before it that are kept, and its own
    """

    heads: int
    width: int
    groups: int
    state: int
    kernel: int

    @property
    def mixed(self) -> int:
        """Channels of the convolution: inputs and both directions side by side."""
        return self.heads * self.width + 2 * self.groups * self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaShape:
    """What a model of Gemma-4's layers has beside a Llama's sizes (gemma4.py). Layers with a window turn as a Llama's do.

    theta  of the rotary embedding of the layers without a window
    pairs  of a head that turn there, from the first on
    cap    that logits are kept below; 0: they are not
    """

    theta: float
    pairs: int
    cap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedShape:
    """Of layers with several streams, a window and compressed rows (compressed.py).

    ratios   of each layer, rows that make one compressed row: 4, 128, or 0: none does; query_rank: as LatentShape's
    rope     width of a key's part that turns; window: rows that are seen as they are; groups, group_rank: of heads' output
    index_heads, index_width, chosen  of what chooses compressed rows of ratio 4; streams, sinkhorn, stream_eps: of streams
    window_theta  base of turns where nothing is compressed; theta, scaling: elsewhere
    """

    ratios: tuple[int, ...]
    query_rank: int
    rope: int
    groups: int
    group_rank: int
    window: int
    index_heads: int
    index_width: int
    chosen: int
    streams: int
    sinkhorn: int
    stream_eps: float
    window_theta: float
    theta: float
    scaling: RopeScaling

    def stored(self, width: int) -> int:
        """Numbers that are stored of a row of the target: its own, a compressed row and an index key."""
        return 2 * width + self.index_width if any(self.ratios) else width

    def kept(self, ratio: int, width: int) -> tuple[tuple[str, int], ...]:
        """What compressors of a layer of this ratio keep of a row, in order, and how wide each is."""
        own, index = (2 if ratio == 4 else 1) * width, 2 * self.index_width
        kept = (("vectors", own), ("scores", own), ("index vectors", index), ("index scores", index))
        return kept if ratio == 4 else kept[:2]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama: the fields of a Hugging Face `LlamaConfig` that change its arithmetic; and of a Qwen3, a Qwen3-MoE or a
    DeepSeek-V3, whose layers differ from a Llama's in their attention or in their feed-forward part.

    aux_layers  layers, from 0, whose output is handed to the draft in place of the state after the final norm (EAGLE-3)
    pre_norm    the state before the final norm is handed to the draft (Step-3.5)
    qk_norm     each head's queries and keys are normalized before RoPE (Step-3.5, Qwen3)
    rope_scaling  None: every pair turns by its own angle
    latent      attention is latent: of a position one row is stored, as of one KV head of width latent.width; None: it is not
    index       latent attention attends to chosen rows alone; None: to all
    experts     of the layers whose weights have a router; None: of none
    clamped     of all layers, as gpt-oss has them; None: of none
    windows     of each layer, how many rows a row sees: the newest ones, with itself; 0: all. Empty: no layer has a window
    delta       of the layers that keep a state in place of rows by the gated delta rule; None: there are none
    scan        of those that keep one of a selective state space; None: there are none
    attends_every  with either: every so many layers one attends, the last of them; the others keep a state
    gemma       its layers are Gemma-4's; None: they are not
    turning     width of a head's front part that turns with its position (RoPE); 0: all of it
    rope_theta  of those turns; 0: nothing turns (Nemotron-H)
    gated       each head's attention is multiplied by a sigmoid of a gate, which the query's projection makes too
    compressed  its layers are DeepSeek-V4's; None: they are not
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    aux_layers: tuple[int, ...] = ()
    pre_norm: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    latent: LatentShape | None = None
    index: IndexShape | None = None
    experts: ExpertShape | None = None
    clamped: ClampedExperts | None = None
    windows: tuple[int, ...] = ()
    delta: DeltaShape | None = None
    scan: ScanShape | None = None
    attends_every: int = 1
    gemma: GemmaShape | None = None
    turning: int = 0
    gated: bool = False
    compressed: CompressedShape | None = None

    def keeps_state(self, layer: int) -> bool:
        """Whether this layer keeps a state in place of rows."""
        return (self.delta or self.scan) is not None and (layer + 1) % self.attends_every > 0

    @property
    def states(self) -> int:
        """How many layers keep a state."""
        return sum(map(self.keeps_state, range(self.num_layers)))

    @property
    def routed(self) -> int:
        """Experts that a router chooses from; 0: there is none."""
        kind = self.experts or self.clamped
        return kind.count if kind else 0

    @property
    def chooses(self) -> bool:
        """Whether a router leaves experts out, by numbers of a row."""
        kind = self.experts or self.clamped
        return kind is not None and kind.chosen < kind.count and not (self.experts and self.experts.settled)

    def window(self, layer: int) -> int:
        """How many rows a row of this layer sees; 0: all that stand before it."""
        return self.windows[layer] if self.windows else 0


def count_candidates(topk: int, num_steps: int) -> int:
    """Candidates of a tree of num_steps depths: k + (num_steps - 1) * k * k."""
    return topk + (num_steps - 1) * topk * topk


def branch_pages(committed: int, num_steps: int, page_size: int) -> int:
    """Pages of one branch's region, for topk > 1 and page_size > 1: it begins with a copy of the prefix's partial page."""
    return -(-(committed % page_size + num_steps) // page_size)


def reserved_slots(topk: int, num_steps: int, page_size: int, num_draft_tokens: int) -> int:
    """Slots that SGLang sets aside for one round, before M is known: the widest round there can be.

    Source: `get_alloc_len_per_decode` in SGLang 0.5.23's mem_cache/allocation_sizing.py. It keeps twice that per request.
    """
    if topk == 1 or page_size == 1:
        return max(topk * num_steps, num_draft_tokens)
    return max(topk * branch_pages(page_size - 1, num_steps, page_size) * page_size, num_draft_tokens)
