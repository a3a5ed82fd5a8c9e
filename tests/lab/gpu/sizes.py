"""Batches of every size, in a graph of their own size, padded to a larger one, and without one: what `gpu plan --sizes` adds.

Generated cases seldom have more than six requests. Here each request arrives when the one before has had its first round, so
that a case decodes batches of one, two, … eight; and each engine captures graphs for other sizes.
"""

from dataclasses import replace

from eagletwin.cases.strategies import Focus
from eagletwin.harness.core.case import Case, Event, Request
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.families.dimensions.dimension import tokens

from .job import Job

SIZES = range(1, 9)

# Sizes that graphs are captured for -> what that makes of batches of 1 to 8. For more requests than may run at once SGLang
# captures nothing, so 16 may.
CAPTURES = (
    tuple(SIZES),  # all exact
    (16,),  # all padded
    (4, 8),  # exact and padded
    (2, 5),  # padded, exact, and from 6 on without a graph: a runner that is there and must not be taken for one that ran
    (1,),  # all but one without a graph
    (),
)
# A chain, a tree, and a draft of several layers; none has a known bug of 0.5.17 that these cases would show.
CONFIGURATIONS = {
    "chain": Focus(num_steps=3, max_running_requests=16),
    "tree": Focus(num_steps=3, topk=3, tree_size=1, max_running_requests=16),
    "layers": Focus(model="llama-mtp", num_steps=2, max_running_requests=16),
}


def staircase(configuration: Focus, seed: int, events: tuple[Event, ...] = ()) -> Case:
    """Eight requests, one after the other: a prefill and a round of all that are there, and so on until all eight have met.
    They end one after the other too."""
    requests = tuple(
        Request(
            id=f"r{number}",
            prompt=tokens(seed * 16 + number, 3 + number % 4, 96),
            max_new_tokens=(len(SIZES) - number) * (configuration.num_steps + 1) + 2,  # a round brings num_steps + 1 at most
            arrive=2 * number,
        )
        for number in range(len(SIZES))
    )
    return configuration.case(f"sizes-{seed}", requests, events=events)


# Events of a batch of eight: an abort, a retraction of all, a pause, and an abort in the queue.
EIGHT_EVENTS = (
    Event(at=9, kind="abort", request="r1"),
    Event(at=13, kind="retract"),
    Event(at=16, kind="pause"),
    Event(at=18, kind="resume"),
    Event(at=19, kind="retract"),
    Event(at=19, kind="abort", request="r5"),
)


def every_size(tp: int = 1) -> list[Job]:
    """An engine for each configuration and each set of graphs, with overlap and without, half of them with pages.

    tp: ranks that share the work"""
    jobs = []
    for number, graphs in enumerate(CAPTURES):
        for place, (name, configuration) in enumerate(CONFIGURATIONS.items()):
            for overlap in (False, True):
                chosen = replace(configuration, page_size=4 if (number + place + overlap) % 2 else 1)
                cases = (staircase(chosen, 1), staircase(chosen, 2, EIGHT_EVENTS), staircase(chosen, 3))
                words = "-".join(map(str, graphs)) or "none"
                jobs.append(
                    Job(
                        name=f"sizes-{name}-{words}-{'overlap' if overlap else 'normal'}-page{chosen.page_size}",
                        mode=Mode(device="cuda", graphs=graphs, overlap=overlap, tp=tp),
                        cases=cases,
                        again=True,
                    )
                )
    return jobs
