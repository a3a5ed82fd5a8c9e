"""What a request of a streaming session is asked: all that was said in the session before, and its own prompt behind it."""

from collections.abc import Container, Mapping, Sequence

from .case import Case


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
