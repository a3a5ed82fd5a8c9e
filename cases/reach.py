"""Where an entry of the ledger shows: in which modes, and ported to another model."""

import dataclasses
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.run_spec import CPU, TITLES, Dtype, Mode, mode_of_case
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.dimensions.dimension import with_settings
from eagletwin.harness.families.valid import admits, check_case, not_in_stages

from .entry import Entry, Needs

# Which entries of the ledger a mode can show, which mode of a CPU shows one, and what is said of the others.


def why_unreachable(entry: Entry, mode: Mode = CPU) -> str:
    """Why both sides of an entry are the same in this mode; empty if they are not."""
    needs = entry.needs
    if entry.engine != mode.engine:
        return f"{entry.id} is a bug of {TITLES[entry.engine]}: it needs --engine {entry.engine}"
    if needs is None:
        return ""
    mode = mode_of_case(mode, entry.case.engine.sglang)
    required = (
        ("--device", needs.device, mode.device),
        ("--dtype", needs.dtype, mode.dtype),
        ("--attention", needs.attention, mode.attention),
    )
    lacks = [" ".join(f"{option} {wanted}" for option, wanted, given in required if wanted not in ("", given))]
    lacks += ["CUDA graphs"] if needs.graphs and not mode.graphs else []
    lacks += ["--prefill-graphs"] if needs.prefill_graphs and not mode.prefill_graphs else []
    if needs.overlap is not None and needs.overlap != mode.overlap:
        lacks.append("--overlap" if needs.overlap else "--no-overlap")
    lacks += [f"--pp {needs.pp}"] if needs.pp > mode.pp else []
    words = " and ".join(filter(None, lacks))
    return f"{entry.id} is not reached in this mode: it needs {words}" if words else ""


def on_a_cpu(entry: Entry) -> Mode:
    """The mode of a CPU in which an entry shows; as it always is for one that shows in none."""
    needs = entry.needs
    if needs is None or needs.device not in ("", "cpu"):
        return replace(CPU, engine=entry.engine)
    dtype: Dtype = needs.dtype or CPU.dtype
    return Mode(overlap=bool(needs.overlap), pp=needs.pp, dtype=dtype, engine=entry.engine)


def case_in(entry: Entry, mode: Mode = CPU) -> Case | None:
    """The entry's case as a search in this mode runs it, with overlap where the bug needs that. None: it is not reached."""
    case = replace(entry.case, exercises=())
    if mode.device == "cpu" and entry.needs is not None and entry.needs.overlap:
        case = with_settings(case, overlap=True)
    return None if why_unreachable(dataclasses.replace(entry, case=case), mode) else case


def unreached_text(entry: Entry, mode: Mode = CPU) -> str:
    """The same as text, with what follows and what to do."""
    needs = entry.needs or Needs()
    where = ", on a machine that has it (docs/guide/gpu.md)" if needs.device else ""
    return (
        f"UNKNOWN  {why_unreachable(entry, mode)}\n"
        "  so:  neither side was run; this says nothing about the release\n"
        f"  try: eagletwin prove {f'{entry.id} {entry.options}'.rstrip()}{where}\n"
    )


# An entry of the ledger in another model: the same bug looked for with the draft and target of another family.
#
# A case of the ledger is minimal for its own recipe. Another pair accepts other drafts, so that the same requests may not reach
# what the entry is about; then its prompts are others, and its answers longer.

# (further prompt tokens, further new tokens) with which other prompts are tried. A longer answer has more kinds of rounds.
_LONGER = ((0, 0), (0, 10), (4, 10), (4, 30))
_PROMPTS = 6  # for each of them
CASES = 1 + len(_LONGER) * _PROMPTS  # that are tried at most

# (model, prompt, count) -> the tokens with which the target alone answers
Says = Callable[[str, tuple[int, ...], int], list[int]]


def cannot_be_in(entry: Entry, model: str) -> str:
    """Why the fault of an entry cannot occur with a model, by what the entry is about; empty: it can be asked there."""
    home, recipe = RECIPES[entry.case.model], RECIPES[model]
    needs = entry.needs or Needs()
    unstaged = not_in_stages(replace(entry.case, model=model), needs.pp) if needs.pp > 1 else ""
    if unstaged:
        return f"it is about pipelines: {unstaged}"
    if home.mtp_layers and not recipe.mtp_layers:
        return "it is about drafts of several layers, and this draft has one"
    if home.frozen and not recipe.frozen:
        return "it is about drafts that read the target's rows"
    if recipe.reads_states and not home.reads_states:
        return "it is about drafts that are language models of their own"
    if entry.case.gives_states and home.target.aux_layers and not recipe.target.aux_layers:
        return "it is about heads that read several layers of the target"
    if home.target.windows and not recipe.target.windows:
        return "it is about sliding windows, and this model has none"
    if home.target.states and not recipe.target.states:
        return "it is about layers that keep a state, and this model has none"
    if home.target.index is not None and recipe.target.index is None:
        return "it is about sparse attention, and this model has none"
    if recipe.frozen and needs.attention:
        return "it is about a backend that the engine's class of this model refuses"
    if home.target.latent is not None and recipe.target.latent is None and needs.attention:
        return "it is about the latent branch of a backend, and this model has none"
    if home.target.compressed is not None and recipe.target.compressed is None:
        return "it is about compressed rows, and this model has none"
    try:
        check_case(_in_model(entry.case, model), entry.id)
    except InputError as error:
        return error.cause.removeprefix(f"{entry.id}: ")
    return ""


def port_entry(entry: Entry, model: str, says: Says) -> Iterator[Entry]:
    """The entry with its case in this model: as it stands, then with other prompts, as long as the model admits the case.

    The first is admitted wherever `cannot_be_in` is empty.
    """
    case = _in_model(entry.case, model)
    for number, more_prompt, more_tokens in [
        (0, 0, 0),
        *((at, *longer) for longer in _LONGER for at in range(1, _PROMPTS + 1)),
    ]:
        last = RECIPES[entry.case.model].end_of_sequence
        requests = (_other(request, model, last, number, more_prompt, more_tokens) for request in case.requests)
        tried = replace(case, requests=tuple(_with_stop_token(request, model, says) for request in requests))
        if admits(tried):
            yield dataclasses.replace(entry, case=tried)


def _in_model(case: Case, model: str) -> Case:
    """The case of this model. A tree of several layers has one node a step, and no more."""
    larger = RECIPES[model].mtp_layers and case.num_draft_tokens > case.num_steps + 1
    nodes = 0 if larger else case.num_draft_tokens
    return replace(case, model=model, name=f"{case.name}-{model}", num_draft_tokens=nodes)


def _other(request: Request, model: str, last: int, number: int, more_prompt: int, more_tokens: int) -> Request:
    """The request with other tokens, which differ wherever they did, and are the same wherever they were. last: of the
    vocabulary at home, which becomes that of this one."""
    most = RECIPES[model].end_of_sequence
    tail = tuple(7 + 5 * at for at in range(more_prompt))
    prompt = tuple(most if token == last else (token + 13 * number) % most for token in (*request.prompt, *tail))
    return replace(request, prompt=prompt, max_new_tokens=request.max_new_tokens + more_tokens)


def _with_stop_token(request: Request, model: str, says: Says) -> Request:
    """With the stop token that this model's target says one token before the end, as it does where the case is at home."""
    if not request.stop or request.max_new_tokens < 2:
        return request
    return replace(request, stop=(says(model, request.prompt, request.max_new_tokens)[-2],))
