"""What one scheduler speculates with: who drafts, by which runners and graphs, and how large. Known once it is built."""

import sys
from dataclasses import dataclass
from typing import Any

from ..compat import adaptive, workers
from ..compat.names import pick


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
    )


def _graphs(scheduler: Any, name: str) -> list[Any]:
    """What the drafter has under this name, and what it will have when its number of steps changes."""
    holders = [workers.drafter(scheduler), *adaptive.states(scheduler)]
    found = [getattr(holder, name, None) for holder in holders]
    return list({id(graph): graph for graph in found if graph is not None}.values())
