"""What one scheduler speculates with: who drafts, by which runners and graphs, and how large. Known once it is built."""

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import torch

from eagletwin.harness.core.run_spec import Attention

from ..compat import adaptive, workers
from ..compat.workers import pick
from ..graphs.tape import Tape


def draft_runners(scheduler: Any) -> list[Any]:
    """The draft's model runners, by layer; a single head has one, and a plain engine none."""
    if scheduler.draft_worker is None:
        return []
    drafter = workers.drafter(scheduler)
    return list(getattr(drafter, "draft_runner_list", None) or [pick(drafter, "draft_runner", "draft_model_runner")])


@dataclass(frozen=True, slots=True)
class Speculation:
    """SGLang's own objects, which the taps stand at, and the sizes of its trees. Nothing but `steps` and `width` changes
    while a case runs.

    worker         runs the rounds; drafter: drafts (v1: one object does both)
    target, drafts  model runners; of a multi-layer draft one a layer
    draft_graphs, extend_graphs  what replays draft decode and draft extend in CUDA graphs: one each, of adaptive steps one for
             every number of them; none without graphs
    layers         of a multi-layer draft; 0: a single head, which runs once for each step
    states         whether hidden states are handed from one forward to the next: not to a draft that is a plain language model
    adaptive       whether the number of steps is chosen anew for each round
    memory         whether the draft has rows of its own; else it reads the target's
    roots          whether draft decode has a forward for each step, so that the first can run the bonus token
    tapes          whether graphs are tapes, whose probes show what is inside (graphs/install.py)
    """

    worker: Any
    drafter: Any
    target: Any
    drafts: list[Any]
    draft_graphs: list[Any]
    extend_graphs: list[Any]
    layers: int
    topk: int
    page: int
    states: bool
    adaptive: bool
    memory: bool
    roots: bool
    tapes: bool

    @property
    def steps(self) -> int:
        """Draft steps of the round that runs: adaptive ones change between two rounds."""
        return int(self.worker.speculative_num_steps)

    @property
    def width(self) -> int:
        """Nodes of a tree of that round, its root among them (num_draft_tokens)."""
        return int(self.worker.speculative_num_draft_tokens)

    def of_round(self) -> dict[str, int]:
        """What the records of a round say of its size: nothing where all rounds have the same."""
        return {"steps": self.steps} if self.adaptive else {}

    @property
    def module(self) -> Any:
        """The module by whose names draft decode calls SGLang's functions: that of the class which defines it."""
        owner = next(kind for kind in type(self.drafter).__mro__ if "draft_forward" in vars(kind))
        return sys.modules[owner.__module__]


def speculation(scheduler: Any) -> Speculation:
    drafter, worker, drafts = workers.drafter(scheduler), scheduler.draft_worker, draft_runners(scheduler)
    steps, states = int(worker.speculative_num_steps), not scheduler.spec_algorithm.is_standalone()
    frozen = "FROZEN" in scheduler.spec_algorithm.name  # older releases know no such algorithm
    planned = getattr(getattr(drafter, "draft_attn_backend", None), "attn_backends", ())
    return Speculation(
        worker=worker,
        drafter=drafter,
        target=scheduler.tp_worker.model_runner,
        drafts=drafts,
        draft_graphs=_graphs(scheduler, "cuda_graph_runner"),
        extend_graphs=_graphs(scheduler, "cuda_graph_runner_for_draft_extend"),
        layers=len(drafts) if hasattr(drafter, "draft_runner_list") else 0,
        topk=int(worker.topk),
        page=int(scheduler.page_size),
        states=states,
        adaptive=adaptive.controller(scheduler) is not None,
        memory=not frozen,
        roots=frozen or (not states and len(planned) >= steps),
        tapes=issubclass(torch.cuda.CUDAGraph, Tape),
    )


def _graphs(scheduler: Any, name: str) -> list[Any]:
    """What the drafter has under this name, and what it will have when its number of steps changes."""
    holders = [workers.drafter(scheduler), *adaptive.states(scheduler)]
    found = [getattr(holder, name, None) for holder in holders]
    return list({id(graph): graph for graph in found if graph is not None}.values())


# The parts of a worker that SGLang chooses itself: attention backends, and the classes that capture and replay its graphs.
#
# A trace says it, so that what ran is shown and not assumed: it depends on the attention backend which layers have a graph
# each, and which share one. Called by boot.py and engine.py.

_CLASSES: dict[Attention, str] = {
    "triton": "TritonAttnBackend",
    "fa3": "FlashAttentionBackend",
    "flashinfer": "FlashInferAttnBackend",
    "flashmla": "FlashMLABackend",
}
_LATENT: dict[Attention, str] = {"flashinfer": "FlashInferMLAAttnBackend"}


def backend_class(name: Attention, *, latent: bool) -> str:
    """The class of an attention backend; FlashInfer has another one for latent attention."""
    return (_LATENT if latent else {}).get(name) or _CLASSES[name]


def attention_backends(scheduler: Any) -> str:
    """The classes of the attention backends of the target's runner and of the draft's; one name if all are of one. Where other
    layers keep a state, a backend of both kinds has the one that attends inside."""
    backends = [runner.attn_backend for runner in (scheduler.tp_worker.model_runner, *draft_runners(scheduler))]
    return " and ".join(sorted({type(getattr(one, "full_attn_backend", one)).__name__ for one in backends}))


def draft_window(scheduler: Any) -> tuple[int, int]:
    """How many of the newest committed rows the draft reads, and how many of the first: of its draft decode, or of the model
    itself, as an EAGLE-3 head has it. (0, 0): all. Without draft decode (one step) it is what the server was asked for."""
    backend: Any = getattr(workers.drafter(scheduler), "draft_attn_backend", None)
    if window := getattr(backend, "draft_window_size", 0):
        return window, backend.draft_sink_size
    if window := getattr(draft_runners(scheduler)[0], "sliding_window_size", None):
        return window, 0
    asked = () if backend is not None else ("speculative_draft_window_size", "speculative_draft_sink_size")
    window, sink = (getattr(scheduler.server_args, name, None) or 0 for name in asked) if asked else (0, 0)
    return window, sink


def parts_of_worker(scheduler: Any) -> tuple[str, ...]:
    """The classes, each behind what it does; what the worker lacks is left out."""
    drafter = workers.drafter(scheduler)
    found = {
        "draft decode's attention": getattr(drafter, "draft_attn_backend", None),
        "verify in graphs": getattr(scheduler.tp_worker.model_runner, "decode_cuda_graph_runner", None),
        "draft decode in graphs": getattr(drafter, "cuda_graph_runner", None),
        "draft extend in graphs": getattr(drafter, "cuda_graph_runner_for_draft_extend", None),
    }
    classes = {what: type(part).__name__ for what, part in found.items() if part is not None}
    return tuple(f"{what}: {name}" for what, name in ({"attention": attention_backends(scheduler)} | classes).items())


# The engine of a configuration without speculative decoding: what SGLang is given for it.

_SPECULATIVE = ("speculative_", "enable_multi_layer_eagle")


def plain_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The same fields of ServerArgs without those of drafts. Batches do not overlap: each token is known when the next is
    chosen."""
    return {name: value for name, value in given.items() if not name.startswith(_SPECULATIVE)} | {
        "disable_overlap_schedule": True
    }


def order_penalties(shims: list[str]) -> None:
    """Have penalties applied in the order of SGLang's overlap scheduler and of its verify: what is added, then what is scaled.

    Without overlap the order is that of a set of classes, another in each process (docs/explanation/plain-decode.md)."""
    module: Any = importlib.import_module("sglang.srt.sampling.penaltylib.orchestrator")
    orchestrator = module.BatchedPenalizerOrchestrator
    begin = orchestrator.__init__

    def add_sorted(self: Any, vocab_size: int, batch: Any, penalizers: set[type]) -> None:
        begin(self, vocab_size, batch, sorted(penalizers, key=lambda kind: ("Repetition" in kind.__name__, kind.__name__)))

    orchestrator.__init__ = add_sorted
    shims.append("BatchedPenalizerOrchestrator: penalties that scale come last")
