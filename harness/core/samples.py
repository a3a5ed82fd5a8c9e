"""Several samples of one prompt (`n`): the requests that the scheduler is sent for one request, as SGLang's tokenizer process
sends them (`TokenizerManager._handle_batch_request`).

First one of the same prompt that is to be sent no token: it leaves the prompt in the prefix cache. When it has ended come `n`
requests of the same prompt, all at once, each with all that was asked.
"""

from msgspec.structs import replace

from .case import Case, Request

LONGEST = "16"  # of the numbers that are added to a request's id


def expanded(case: Case) -> Case:
    """The case as the scheduler sees it: without `n`."""
    if not several(case):
        return case
    return replace(case, requests=tuple(sent for request in case.requests for sent in sent_for(request)))


def several(case: Case) -> tuple[Request, ...]:
    """The requests of which several answers are wanted."""
    return tuple(request for request in case.requests if request.n > 1)


def sent_for(request: Request) -> list[Request]:
    """The requests that the scheduler is sent for one.

    SGLang gives each an id of its own, at random. Here they are told apart by a number, from 0 for the first on, whose
    min_new_tokens the scheduler makes as small as its max_new_tokens."""
    if request.n == 1:
        return [request]
    first = replace(request, id=f"{request.id}.0", n=1, max_new_tokens=0, min_new_tokens=0, stream=False)
    return [first, *(replace(request, id=f"{request.id}.{number + 1}", n=1, after=first.id) for number in range(request.n))]
