"""Requests that ask for hidden states of the target."""

from eagletwin.harness.families import RECIPES

from .dimension import of_requests, st

STATES = ("", "all", "last", "all")
# Releases before 0.5.17 give a request all its hidden states or none, and do not know the second
_ARGUMENTS = {"": {}, "all": {"enable_return_hidden_states": True}, "last": {"return_hidden_states_mode": "last"}}


DIMENSION = of_requests(
    "hidden_states",
    "hidden states",
    row="`return_hidden_states`: `all` (prompt and each token) or `last` (the last token's, from 0.5.17 on) | none",
    key="hidden-states",
    example="all",
    draw=lambda draw, request, vocabulary: draw(st.sampled_from(STATES)),
    of_prompt=True,
    kind=True,
    kinds={"hidden_states_of_layers": lambda case: bool(case.gives_states and RECIPES[case.model].target.aux_layers)},
    message=lambda request: {"return_hidden_states": {"": False, "last": "last", "all": True}[request.hidden_states]},
    arguments=lambda case: _ARGUMENTS[case.gives_states],
    happened={
        "states_of_path": (
            "a request was given the hidden states of several tokens that one round gave it",
            lambda run: any(run.requests[one.request].hidden_states and one.numbers["accept_len"] > 1 for one in run.verified),
        ),
        "states_of_chunks": (
            "a request was given the hidden states of a prompt that came in several chunks",
            lambda run: any(run.requests[one.request].hidden_states == "all" for one in run.chunks),
        ),
    },
)
