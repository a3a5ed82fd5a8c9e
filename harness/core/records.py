"""The structs of a trace, as trace.json holds them: records, the ending, what ran, and the header. Plain data.

trace.py writes and reads them.
"""

import hashlib
from collections.abc import Iterable
from enum import IntEnum
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from .case import Case
from .differs import Differs
from .run_spec import TITLES, Dtype

# Jitter: seeded pauses on the streams of a GPU, and where they fell in a run. engines/sglang/drive.py makes them.


class Jitter(Struct, frozen=True):
    """What is asked of a run that records nothing of its batches.

    seed     draws which points get a pause, and how long each is: the same seed and the same points, the same pauses
    share    of the points, 0 to 1, that get one
    longest  microseconds. Pauses are spread evenly over the orders of magnitude from a hundredth of it on; 0: there is none
    """

    seed: int
    share: float = 0.12
    longest: int = 20_000


class Pause(NamedTuple):
    """A pause. point: its number among the points of the run, from 0; place: the call that it follows, and the stream;
    microseconds: how long at least."""

    point: int
    place: str
    microseconds: int


class Jittered(Struct, frozen=True):
    """What became of it. points: calls after which a pause might have been."""

    asked: Jitter
    points: int
    pauses: tuple[Pause, ...]


Size = Annotated[int, Meta(ge=0, lt=1 << 32)]


class Key(NamedTuple):
    """What tells a record from all others of its trace; two traces of one case are matched by it."""

    request: str
    round: int
    stage: str
    step: int = 0
    layer: int = 0
    attempt: int = 0


class Record(Struct, frozen=True, kw_only=True, gc=False):
    """One request's share of one stage.

    request    id, or "" for what belongs to no request (pool accounting, the flush)
    round      verify ordinal of the request: how many times it had been verified before
    stage      inner: a single forward. boundary: `prefill` (a chunk's target and draft extend are done), `draft` (draft() has
               returned), `verify`, `extend` (draft extend after verify is done), `iteration` (before a scheduler
               iteration), `batch` (before a batch runs), `read` (a result was looked at before a retraction), `finished`,
               `cached` (a radix path), `copy` (between device and host), `session` (a request of a session is handed in, or a
               session closed), `plain` (what plain decode would have sent it), `flushed`
    layer      of a multi-layer draft: the one whose forward this is; else 0
    step       draft.decode: j = 1..num_steps-1; prefill and its forwards: first position of the chunk; iteration, batch:
               an ordinal; else 0
    attempt    how many records with the same request, round, stage, step and layer came before: a request that is retracted
               before it was verified is prefilled again
    iteration  scheduler iteration, from 0; information, not part of the key (overlap shifts it)
    forward    ordinal of the forward, equal for all requests of one batch
    numbers    scalars by name
    tensors    names of the tensors that belong to the record, in trace.safetensors as "{record number}.{name}" of a Trace
    """

    request: str
    round: int
    stage: str
    step: int = 0
    layer: int = 0
    attempt: int = 0
    iteration: int = 0
    forward: int = 0
    numbers: dict[str, int] = {}
    tensors: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return Key(self.request, self.round, self.stage, self.step, self.layer, self.attempt)


def accept_lengths(records: Iterable[Record], request: str = "") -> list[int]:
    """Of each verify of a request, or of all: tokens that it committed, the bonus token counted."""
    own = (record for record in records if record.stage == "verify" and request in ("", record.request))
    return [record.numbers["accept_len"] for record in own]


class Ending(Struct, frozen=True, kw_only=True):
    """How the run ended. `detail` tells a person; `where` is the last stage that was reached.

    stopped: the caller asked for no more. faulted: a kernel did what it must not (memory outside its tensors, undefined
    values, a race); `rule` says which. unseen: a tap of the harness failed, which says nothing about the worker.

    origin  what ended it, the same in every case that it ends: the exception's class with the release's innermost frame, by
            file and function; of a fault, the kernel. Absent where no exception was seen
    """

    kind: Literal["finished", "stopped", "crashed", "hung", "faulted", "unseen"]
    detail: str = ""
    where: str = ""
    rule: str = ""
    origin: str | UnsetType = UNSET


class EngineInfo(Struct, frozen=True, kw_only=True):
    """What ran: everything that two traces must share to be comparable number for number, and all that was changed in it.

    worker   what the engine calls the worker that it ran
    overlap  whether the scheduler launches a batch before it reads the results of the batch before it: a request that has
             finished then takes part in one more round
    parts    on a GPU: the classes that the engine's attention backends and the runners of its graphs are of
    tp       tensor parallelism: how many ranks share the work; rank: which of them left this trace
    pp       pipeline parallelism: how many stages there are; the trace is of the last, which has the target's layers from
             first_layer on, and the draft
    dp       DP attention: how many ranks there are, each with requests of its own
    graphs   batch sizes for which graphs of decode were asked for
    """

    name: str
    version: str
    device: str
    kernels: str
    torch: str
    triton: str
    transformers: str = ""
    worker: str = ""
    overlap: bool = False
    patches: tuple[str, ...] = ()
    shims: tuple[str, ...] = ()
    tp: int = 1
    rank: int = 0
    mode: str = ""  # graphs, overlap and dtype, where they are not those of the CPU engine
    dtype: Dtype = "float32"
    parts: tuple[str, ...] = ()
    pp: int = 1
    first_layer: int = 0
    graphs: tuple[int, ...] = ()
    dp: int = 1

    @property
    def title(self) -> str:
        """What reports call it."""
        return TITLES.get(self.name, self.name)

    @property
    def processes(self) -> int:
        """Processes that ran the case together, each of which left a trace."""
        return self.tp * self.pp * self.dp

    @property
    def several(self) -> str:
        """Behind the device, in a line: of how many ranks or stages it is; empty if of one."""
        ranks = f", {self.tp} ranks" if self.tp > 1 else f", {self.dp} ranks of DP attention" if self.dp > 1 else ""
        return f"{ranks}, {self.pp} stages" if self.pp > 1 else ranks


class ServedModel(Struct, frozen=True, kw_only=True):
    """What the judge must know of a model that no recipe describes: that of a server that was recorded.

    ends        end-of-sequence tokens
    mtp_layers  layers of a multi-layer draft; 0: a single head
    states      whether the draft consumes hidden states; else it is a plain language model
    """

    vocab_size: int
    ends: tuple[int, ...] = ()
    mtp_layers: int = 0
    states: bool = True


class Header(Struct, frozen=True, kw_only=True):
    """dtypes (between spaces), shapes: of the tensors of all records, in order. Each is the next numel(shape) numbers of the
    flat tensor of its dtype, after those before it. differs: in what the engine differs from its base. served: of a recording,
    which has no recipe and none of its numbers (core/recording.py)."""

    schema: int
    case: Case
    weights: str
    engine: EngineInfo
    inner: bool
    ending: Ending
    records: tuple[Record, ...]
    fallbacks: tuple[str, ...] = ()
    idle_edits: tuple[str, ...] = ()
    before: int = 0
    unreached_edits: tuple[str, ...] | UnsetType = UNSET  # of patches that ran: functions called in vain
    patched: tuple[Differs, ...] | UnsetType = UNSET  # what each patch changes, and which of its statements ran
    differs: Differs | UnsetType = UNSET  # left out for a release, whose traces stay as they were
    served: ServedModel | UnsetType = UNSET
    jittered: Jittered | UnsetType = UNSET  # of a run with pauses, which has no batches and cannot be judged
    dtypes: str = ""
    shapes: tuple[tuple[Size, ...], ...] = ()
    tensors_sha256: str = ""
    sha256: str = ""

    @property
    def numbers(self) -> str:
        """A digest of all that was recorded: the same for two runs that computed the same."""
        records = hashlib.sha256(msgspec.json.encode(self.records))
        return hashlib.sha256(records.digest() + self.tensors_sha256.encode()).hexdigest()


# Which parts of a worker hold the number of draft steps, and the number of nodes, of a round whose steps are adaptive.
#
# In the order of the two tensors of a trace's record `steps`; a part that a round has not says -1.

STEPS_OF = (
    "the worker",
    "the draft worker",
    "the running configuration",
    "verify's input",
    "the draft's attention backend",
    "the target's attention backend",
    "draft extend's attention backend",
)
NODES_OF = (
    "the worker",
    "the draft worker",
    "the running configuration",
    "verify's input",
    "the target's attention backend",
    "draft extend's attention backend",
)


# What a trace says of a request's answer in numbers: why it ended, and what it was told of the probabilities of tokens.

# What a message counts for a request. UNSAID: this engine's message does not have it.
COUNTS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "cached_device",
    "cached_host",
    "verify_ct",
    "correct_drafts",
    "retractions",
)
UNSAID = -(1 << 31)


class Finish(IntEnum):
    """The kinds of a finish reason. Integers, as all numbers of a record are."""

    LENGTH = 0
    STOP = 1
    ABORT = 2
    OTHER = 3


# Part of a text, and what is said of each of its places: the token there, the best ones, those that were asked for.
LOGPROBS = tuple(f"{part}_{kind}_logprobs" for part in ("input", "output") for kind in ("token", "top", "token_ids"))


# What unwritten and freed KV slots hold: engines write it, and whoever asks whose a wrong number is knows it again.
#
# Poison makes a read of an unwritten slot show. Keys are poisoned with a small number, so that attention gives
# the slot an ordinary weight whatever the query (a huge key could get weight zero and hide); values with a huge finite
# one, so that any weight at all moves the output by more than every bound. Both stay finite in float32, bfloat16 and float16.
#
# A latent row is the key and the value of its slot at once. It is poisoned with 1, the size of the numbers that lie there: such
# a row gets the attention of any other, and its values are as far from the right ones as those of another position.
#
# A state is multiplied by a query and added to: poison is as huge as that of values, and so is that of a convolution's inputs.

KEY_POISON = 0.25
VALUE_POISON = 1.0e4
LATENT_POISON = 1.0
STATE_POISON = 1.0e4

# What a trace has in place of a row whose slot left the window of its layer, and was freed: nothing lies there. It is no number
# that a model computes here, and exact in every type.
GONE = -(2.0**15)
