"""What SGLang is handed for a request: its samples, the whole prompt of a session's turn, and additions to its logits."""

from collections.abc import Container, Mapping, Sequence
from math import inf

from msgspec.structs import replace

from .case import Case, Processor, Request

# Several samples of one prompt (`n`): the requests that the scheduler is sent for one request, as SGLang's tokenizer process
# sends them (`TokenizerManager._handle_batch_request`).
#
# First one of the same prompt that is to be sent no token: it leaves the prompt in the prefix cache. When it has ended come `n`
# requests of the same prompt, all at once, each with all that was asked.

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


# What a request of a streaming session is asked: all that was said in the session before, and its own prompt behind it.


def whole_prompts(case: Case, answers: Mapping[str, Sequence[int]], opening: Container[str]) -> dict[str, tuple[int, ...]]:
    """By request of a session: every token that stands before its answer.

    answers  what requests were sent that ended by themselves: of an aborted one the session keeps nothing, its prompt neither
    opening  requests with which a session begins anew
    """
    said, prompts = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
    for request in case.requests:
        if not request.session:
            continue
        before = () if request.id in opening else said.get(request.session, ())
        said[request.session] = before
        prompts[request.id] = whole = before + request.prompt
        if request.id in answers:
            said[request.session] = (*whole, *answers[request.id])
    return prompts


def before(case: Case, name: str) -> str:
    """The request of the same session that comes before this one; "": there is none, or it is of no session."""
    earlier = ""
    for request in case.requests:
        if request.id == name:
            return earlier if request.session else ""
        if request.session and request.session == _session(case, name):
            earlier = request.id
    return ""


def most_before(case: Case, name: str) -> int:
    """Tokens that can stand before a request's own prompt: of all earlier ones of its session, with their answers."""
    session, total = _session(case, name), 0
    for request in case.requests:
        if request.id == name:
            break
        if session and request.session == session:
            total += len(request.prompt) + request.max_new_tokens
    return total


def _session(case: Case, name: str) -> str:
    return case.request(name).session


# What a request has added to the logits of its tokens: by its logit_bias, and by its custom logit processor.

_STEPS = 33  # of a quarter each, from -4 to 4


def biases(request: Request) -> dict[int, float]:
    """By token."""
    return {bias.token: bias.value for bias in request.logit_bias}


def processed(processor: Processor, vocabulary: int) -> list[float]:
    """What a processor adds, by token."""
    hashed = [_hash(token, processor.seed) for token in range(vocabulary)]
    if processor.kind == "forbid":
        return [-inf if number % 4 == 0 else 0.0 for number in hashed]
    return [(number % _STEPS - _STEPS // 2) / 4 for number in hashed]


def added(request: Request, vocabulary: int) -> list[float] | None:
    """What is added in all, by token; None: nothing."""
    if not request.logit_bias and request.processor is None:
        return None
    own = [0.0] * vocabulary if request.processor is None else processed(request.processor, vocabulary)
    for token, value in biases(request).items():
        own[token] += value
    return own


def _hash(token: int, seed: int) -> int:
    """Some 16 bits that look drawn, the same everywhere."""
    number = (token + 1) * 2654435761 + (seed + 1) * 2246822519
    number = (number ^ number >> 15) * 3266489917 % 2**32
    return (number ^ number >> 13) >> 8
