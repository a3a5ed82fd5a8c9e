"""Which cases the recipes admit, and the cases of strangers read and checked by that.

core/case.py says what a case looks like, field by field; here are the rules that tie fields to each other and to the model.
"""

import itertools
from pathlib import Path

import msgspec

from eagletwin.harness.core.case import MAX_FILE_BYTES, MOST_LETTERS, MOST_REQUESTS, SCHEMA, Case, Request
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.features import FEATURES
from eagletwin.harness.core.files import read_input, refuse_duplicates
from eagletwin.harness.core.grammar import aborted_unread, rules_of
from eagletwin.harness.core.request_inputs import LONGEST, expanded, most_before, several
from eagletwin.harness.core.terminal import count, nearest
from eagletwin.reference.grammar import left_recursive, reaching
from eagletwin.reference.sizes import count_candidates, reserved

from . import RECIPES, family_of
from .adapters import takes_adapters
from .recipe import Recipe


def round_slots(case: Case) -> int:
    """Slots that SGLang sets aside for one round of a request, before its tree is known."""
    return reserved(case.topk, case.most_steps, case.page_size, case.most_nodes)


def _refuse(cause: str, remedy: str) -> InputError:
    return InputError(cause, consequence="nothing was run and nothing was written", remedy=remedy)


def read_case(path: Path) -> Case:
    """The case in a file. Raises InputError for anything that is not a valid case."""
    try:
        data = read_input(path, MAX_FILE_BYTES)
    except OSError as error:
        raise _refuse(f"{path}: {error.strerror}", "name a case file (JSON) or the id of a ledger entry") from error
    if len(data) > MAX_FILE_BYTES:
        raise _refuse(f"{path}: larger than {MAX_FILE_BYTES} bytes", "a case is a few requests; cut it down")
    return decode_case(data, str(path))


def decode_case(data: bytes, origin: str) -> Case:
    """Decode and validate JSON; `origin` names it in errors."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refuse(f"{origin}: not JSON ({error})", "give a case file written by eagletwin") from error
    try:
        refuse_duplicates(data)
    except ValueError as error:
        raise _refuse(f"{origin}: {error}", "leave one of the two out") from error
    schema = raw.get("schema", SCHEMA) if isinstance(raw, dict) else SCHEMA
    if isinstance(schema, int) and schema > SCHEMA:
        raise _refuse(
            f"{origin}: case schema {schema}; this eagletwin reads up to {SCHEMA}", "use the eagletwin that wrote it, or newer"
        )
    try:
        case = msgspec.convert(raw, Case)
    except msgspec.ValidationError as error:
        raise _refuse(f"{origin}: {error}", "correct the field; docs/reference/case.md lists all of them") from error
    check_case(case, origin)
    return case


def check_model(model: str, origin: str) -> None:
    """Raises InputError if no recipe has this name."""
    if model not in RECIPES:
        raise InputError(
            f"{origin}: no model recipe is called {model!r}",
            consequence="nothing was run: this architecture is not covered, and no verdict can be given on its arithmetic",
            remedy=f"{nearest(model, RECIPES)}; all run the same scheduler, worker, trees and commits: "
            "docs/guide/acceptance-fell.md says what can be asked about other models",
        )


def check_case(case: Case, origin: str) -> None:
    """The rules that tie fields together. Raises InputError."""
    if case.schema != SCHEMA:
        raise _refuse(f"{origin}: case schema {case.schema} does not exist", f"set it to {SCHEMA}")
    check_model(case.model, origin)
    unknown = [feature for feature in case.exercises if feature not in FEATURES]
    if unknown:
        raise _refuse(f"{origin}: exercises {unknown[0]!r} is not known", nearest(unknown[0], FEATURES))
    _check_samples(case, origin)
    case = expanded(case)
    _check_pages(case, origin)
    _check_events(case, origin)
    _check_after(case, origin)
    _check_tree(case, origin)
    _check_layers(case, origin)
    _check_sampling(case, origin)
    _check_draft_window(case, origin)
    _check_adaptive(case, origin)
    _check_mixed(case, origin)
    if case.engine.sglang.update_weights and not family_of(RECIPES[case.model]).one_checkpoint:
        raise _refuse(
            f"{origin}: update_weights with {case.model}: eagletwin has no second checkpoint of it, for both together",
            "use llama-tiny, llama-gqa or llama-wide",
        )
    _check_host(case, origin)
    _check_sessions(case, origin)
    _check_adapters(case, origin)
    ids = [request.id for request in case.requests]
    if len(set(ids)) < len(ids):
        raise _refuse(f"{origin}: two requests have the same id", "give each request an id of its own")
    for request in case.requests:
        _check_request(case, request, f"{origin}: request {request.id!r}")


def beside_a_chunk(case: Case) -> int:
    """How many requests may run at most beside one that is read in chunks."""
    return min(len(case.requests), case.engine.sglang.max_running_requests) - 1


def _check_mixed(case: Case, origin: str) -> None:
    """What mixed chunks need: a draft that SGLang mixes, and budgets that leave no chunk empty.

    Each request that runs takes a token of a budget. A server's budget is always the same, and without a pipeline no chunk of
    it is empty: the batch before left a request unread, so it had a token for it, and one for each request that ran or ended
    its prompt there.
    """
    if not case.engine.sglang.mixed_chunks:
        return
    recipe = RECIPES[case.model]
    if not recipe.is_eagle:
        kind = "FROZEN_KV_MTP" if recipe.frozen else "STANDALONE"
        raise _refuse(f"{origin}: mixed_chunks with {case.model}: SGLang switches it off for {kind}", "leave it out")
    beside, budgets = beside_a_chunk(case), [*case.chunks, case.chunked_prefill_size]
    for number, (before, budget) in enumerate(itertools.pairwise(budgets), 1):
        if budget < before and budget <= beside:
            name = f"chunks[{number}]" if number < len(case.chunks) else "chunked_prefill_size"
            raise _refuse(
                f"{origin}: mixed_chunks, and {name} is {budget}, less than the budget before: beside {beside} requests that "
                "run its chunk may be empty, and a server's budget does not fall",
                f"make it {beside + 1} at least, or as large as the one before",
            )


def admits(case: Case) -> bool:
    """Whether an engine would be given this case."""
    try:
        check_case(case, case.name)
    except InputError:
        return False
    return True


def keeps_on_host(recipe: Recipe) -> bool:
    """Whether a hierarchical cache of this model can be judged."""
    return not recipe.target.states and recipe.family != "step3p5" and not recipe.frozen


def _check_host(case: Case, origin: str) -> None:
    """What a hierarchical cache needs."""
    if not case.engine.sglang.host_pages:
        return
    if not case.engine.sglang.radix_cache:
        raise _refuse(f"{origin}: host_pages without the prefix cache: there is nothing to keep", "set radix_cache")
    if not keeps_on_host(RECIPES[case.model]):
        why = "SGLang switches its pool of windows off then, and cannot run it on the Triton backend"
        if RECIPES[case.model].target.states:
            why = "eagletwin does not follow the states of layers on the host"
        elif RECIPES[case.model].frozen:
            why = "eagletwin does not know yet what its draft reads then"
        raise _refuse(f"{origin}: host_pages with {case.model}: {why}", "use another model")


def keeps_sessions(recipe: Recipe) -> bool:
    """Whether streaming sessions of this model can be judged."""
    return not recipe.target.states and not recipe.window


def _check_adapters(case: Case, origin: str) -> None:
    """What adapters need, and what SGLang refuses beside them."""
    if not case.adapters:
        return
    settings, recipe = case.engine.sglang, RECIPES[case.model]
    if not takes_adapters(recipe):
        why = "eagletwin has adapters of Llama's linear maps alone"
        if not recipe.is_eagle:
            why = f"SGLang refuses them with {'FROZEN_KV_MTP' if recipe.frozen else 'STANDALONE'}"
        raise _refuse(f"{origin}: an adapter with {case.model}: {why}", "use another model, such as llama-tiny")
    if settings.adaptive is not None:
        raise _refuse(f"{origin}: an adapter and adaptive steps, which SGLang refuses together", "leave one of them out")


def _check_samples(case: Case, origin: str) -> None:
    """What several samples of a prompt need: room for the requests that the scheduler is sent in place of one."""
    for request in several(case):
        where = f"{origin}: request {request.id!r} with n {request.n}"
        if request.session:
            raise _refuse(f"{where} is a turn of a session, which goes on from one answer", "leave one of the two out")
        if not request.max_new_tokens:
            raise _refuse(f"{where} and max_new_tokens 0: there would be nothing of which to have several", "set n to 1")
        if any(event.request == request.id for event in case.events):
            raise _refuse(
                f"{where} is aborted: the scheduler is sent an abort of each of its samples that the client waits for, and "
                "eagletwin does not play that part",
                "remove the event, or set n to 1",
            )
        if any(other.after == request.id for other in case.requests):
            raise _refuse(
                f"{where}: another request comes after it, and it has {request.n} ends", "set its n to 1, or remove `after`"
            )
        if len(request.id) + len(LONGEST) >= MOST_LETTERS:
            raise _refuse(f"{where}: no room in the id for the number of a sample", "shorten the id")
    count = len(expanded(case).requests)
    if count > MOST_REQUESTS:
        raise _refuse(
            f"{origin}: the scheduler would be sent {count} requests, n and one more for each with several samples",
            f"lower n; {MOST_REQUESTS} are the most",
        )


def _check_after(case: Case, origin: str) -> None:
    """A request comes after an earlier one of the list, so that none waits for itself."""
    earlier = set[str]()
    for request in case.requests:
        where = f"{origin}: request {request.id!r} comes after {request.after!r}"
        if request.after and request.after not in earlier:
            raise _refuse(f"{where}, which is no request before it in the list: it would wait for ever", "name one that is")
        if request.after and request.session:
            raise _refuse(f"{where} and is a turn of a session, which waits for the turn before", "leave one of the two out")
        if request.after and any(event.request == request.id and not event.step for event in case.events):
            raise _refuse(
                f"{where}, and is aborted: SGLang ignores an abort of a request that was not handed in yet",
                "abort it inside a step, or remove `after`",
            )
        earlier.add(request.id)


def _check_sessions(case: Case, origin: str) -> None:
    """What streaming sessions need, and what SGLang would refuse or leave out."""
    if not case.sessions:
        return
    settings = case.engine.sglang
    if not settings.radix_cache:
        raise _refuse(f"{origin}: a session without the prefix cache, which keeps its rows", "set radix_cache")
    if settings.host_pages:
        raise _refuse(
            f"{origin}: a session with host_pages: eagletwin does not follow rows that both keep", "leave one of them out"
        )
    if not keeps_sessions(RECIPES[case.model]):
        what = "states of layers" if RECIPES[case.model].target.states else "slots of a window"
        raise _refuse(
            f"{origin}: a session with {case.model}: eagletwin does not follow the {what} that a session keeps",
            "use another model",
        )
    # SGLang takes nothing from a session: requests that find no room beside it wait for ever
    ahead = 2 * round_slots(case) + 2 * case.page_size
    kept = sum(_most_tokens(case, request) + ahead for request in case.requests if _is_last_turn(case, request))
    others = [_most_tokens(case, request) + ahead for request in case.requests if not request.session]
    need = kept + max(others, default=0)
    if need > settings.max_total_tokens:
        raise _refuse(
            f"{origin}: sessions with up to {need} slots, and the pool has {settings.max_total_tokens}: nobody takes from them "
            "what they hold, and another request would wait for ever",
            "shorten their requests or raise engine.sglang.max_total_tokens",
        )
    entries = len(case.sessions) + bool(others)
    if entries > settings.max_running_requests:
        raise _refuse(
            f"{origin}: {len(case.sessions)} sessions and max_running_requests {settings.max_running_requests}: each keeps an "
            "entry of req_to_token, and another request would wait for ever",
            f"raise engine.sglang.max_running_requests to {entries}",
        )
    if sum(event.kind == "pause" for event in case.events) > sum(event.kind == "resume" for event in case.events):
        raise _refuse(f"{origin}: a session, and a pause without an end: its requests would wait", "add a resume")
    for request in case.requests:
        if not request.session:
            continue
        where = f"{origin}: request {request.id!r} of session {request.session!r}"
        if request.logprobs is not None and request.logprobs.start >= 0:
            raise _refuse(f"{where}: logprobs of its prompt, which SGLang leaves out in a session", "set start to -1")
        of_it = [event for event in case.events if event.kind == "abort" and event.request == request.id and not event.step]
        if request.grammar is not None and of_it:
            raise _refuse(
                f"{where}: it has a grammar, and may be aborted before that is read; SGLang then runs another prompt",
                "abort it inside a step, or leave the grammar out",
            )


def _most_tokens(case: Case, request: Request) -> int:
    """Tokens of a request at its end, with those of its session before it."""
    return most_before(case, request.id) + len(request.prompt) + request.max_new_tokens


def _is_last_turn(case: Case, request: Request) -> bool:
    of_it = [other.id for other in case.requests if other.session == request.session]
    return bool(request.session) and of_it[-1] == request.id


def _check_pages(case: Case, origin: str) -> None:
    """SGLang wants whole pages."""
    if case.chunked_prefill_size % case.page_size:
        raise _refuse(
            f"{origin}: chunked_prefill_size {case.chunked_prefill_size} is not a whole number of pages of {case.page_size}",
            "SGLang wants whole pages; make it a multiple of page_size",
        )
    for number, chunk in enumerate(case.chunks):
        if chunk % case.page_size:
            raise _refuse(
                f"{origin}: chunks[{number}] is {chunk}, not a whole number of pages of {case.page_size}",
                "SGLang wants whole pages; make it a multiple of page_size",
            )
    total = case.engine.sglang.max_total_tokens
    if total % case.page_size:
        raise _refuse(
            f"{origin}: max_total_tokens {total} is not a whole number of pages of {case.page_size}",
            "make it a multiple of page_size",
        )


def _check_request(case: Case, request: Request, where: str) -> None:
    """Its tokens and its length."""
    settings, recipe = case.engine.sglang, RECIPES[case.model]
    biased = [bias.token for bias in request.logit_bias]
    outside = [token for token in (*request.prompt, *biased) if token >= recipe.target.vocab_size]
    if outside:
        raise _refuse(
            f"{where}: token {outside[0]} is outside the vocabulary of {case.model}",
            f"use ids from 0 to {recipe.target.vocab_size - 1}",
        )
    if len(set(biased)) < len(biased):
        raise _refuse(f"{where}: two entries of logit_bias for one token", "add them up")
    if request.min_new_tokens > request.max_new_tokens:
        raise _refuse(
            f"{where}: min_new_tokens {request.min_new_tokens}, and max_new_tokens {request.max_new_tokens}",
            "make it at most as many",
        )
    _check_logprobs(case, request, where)
    _check_grammar(case, request, where)
    # SGLang reserves room for two rounds ahead, in whole pages, before it lets a request run
    prompt = most_before(case, request.id) + len(request.prompt)
    need = prompt + request.max_new_tokens + 2 * round_slots(case) + 2 * case.page_size
    if need > settings.max_total_tokens:
        raise _refuse(
            f"{where}: needs up to {need} slots, and the pool has {settings.max_total_tokens}",
            "shorten the request or raise engine.sglang.max_total_tokens",
        )
    # what SGLang admits without cutting it down
    context = settings.context_length or recipe.max_position
    length = prompt + request.max_new_tokens
    if prompt > context - 7 or length > context - 2:
        raise _refuse(
            f"{where}: a prompt of {prompt} and {length} tokens in all, in a context of {context}",
            f"keep to {context - 7} and {context - 2}",
        )


def _check_logprobs(case: Case, request: Request, where: str) -> None:
    """What SGLang would refuse."""
    wanted, size = request.logprobs, RECIPES[case.model].target.vocab_size
    if wanted is None:
        return
    if wanted.start > len(request.prompt):
        raise _refuse(
            f"{where}: logprobs from {wanted.start} on of a prompt of {len(request.prompt)}", "begin at its end at the latest"
        )
    if wanted.top > size or any(token >= size for token in wanted.tokens):
        raise _refuse(f"{where}: logprobs of more tokens than the {size} of {case.model}", f"use at most {size}, from 0 on")


def _check_grammar(case: Case, request: Request, where: str) -> None:
    """What eagletwin cannot read, what nothing can be answered with, and what the backend does not read right."""
    grammar = request.grammar
    if grammar is None:
        return
    where = f"{where}: grammar"
    if aborted_unread(case, request):
        raise _refuse(
            f"{where}: the request is aborted before it is read; SGLang then runs another prompt in its place",
            "abort it in a later iteration, which is in no pause",
        )
    try:
        rules = rules_of(grammar)
    except ValueError as error:
        raise _refuse(f"{where}: {error}", "docs/reference/case.md says what a rule is") from error
    if grammar.kind == "regex" and (len(grammar.rules) > 1 or any(letter.isupper() for letter in grammar.rules[0])):
        raise _refuse(f"{where}: a regular expression with rules to refer to", "make it one rule without capitals, or an ebnf")
    if len(reaching(rules, letters=True)) < len(rules):
        raise _refuse(f"{where}: a rule has no text that ends", "give it an alternative that does not need the rule itself")
    if grammar.kind == "ebnf" and left_recursive(rules):
        raise _refuse(
            f"{where}: a rule begins with itself, which xgrammar 0.2.8 does not read right", "let it end with itself instead"
        )


def _check_layers(case: Case, origin: str) -> None:
    layers = RECIPES[case.model].mtp_layers
    if layers and case.num_steps > layers:
        raise _refuse(f"{origin}: num_steps {case.num_steps}: {case.model} has {layers} layers", f"use 1 to {layers}")
    if layers and case.verify_nodes != case.num_steps + 1:
        raise _refuse(
            f"{origin}: num_draft_tokens {case.verify_nodes}: a multi-layer draft of {count(case.num_steps, 'step')} has "
            f"{case.num_steps + 1}",
            "leave num_draft_tokens out",
        )


def _check_adaptive(case: Case, origin: str) -> None:
    """SGLang switches adaptive steps off, or does not start, where these do not hold."""
    adaptive, recipe = case.engine.sglang.adaptive, RECIPES[case.model]
    if adaptive is None:
        return
    if case.topk > 1 or not recipe.single_head:
        what = f"topk {case.topk}" if case.topk > 1 else case.model
        raise _refuse(
            f"{origin}: adaptive steps with {what}: SGLang has them for chains of EAGLE and EAGLE-3 heads of one layer alone",
            "use topk 1 and a model with a single head, such as llama-tiny",
        )
    if case.num_steps not in adaptive.choices:
        raise _refuse(
            f"{origin}: num_steps {case.num_steps} is none of the adaptive ones, {sorted(adaptive.choices)}",
            "SGLang does not start with it; use one of them",
        )
    if case.verify_nodes != case.num_steps + 1:
        raise _refuse(f"{origin}: num_draft_tokens {case.verify_nodes} with adaptive steps", "leave num_draft_tokens out")
    batches = [tier.batch for tier in adaptive.tiers]
    if sorted(set(batches)) != batches:
        raise _refuse(f"{origin}: adaptive tiers for batches of {batches}", "give each its own batch, the smallest first")


def _check_draft_window(case: Case, origin: str) -> None:
    """Raise InputError for a window that SGLang refuses, or would silently leave out."""
    recipe, settings = RECIPES[case.model], case.engine.sglang
    if settings.draft_sink and not settings.draft_window:
        raise _refuse(
            f"{origin}: draft_sink {settings.draft_sink} without draft_window", "give draft_window, or leave both out"
        )
    if not settings.draft_window:
        return
    if not recipe.single_head:
        kind = "STANDALONE has no window of draft decode"
        if recipe.mtp_layers or recipe.frozen:
            kind = (
                "a multi-layer draft has no draft decode" if recipe.mtp_layers else "SGLang has none for a draft without rows"
            )
        raise _refuse(f"{origin}: draft_window with {case.model}: {kind}", "leave it out, or use llama-tiny")
    if settings.draft_sink and recipe.own_window:
        raise _refuse(
            f"{origin}: draft_sink with {case.model}: the window of an EAGLE-3 head has no sink, and SGLang would leave it out",
            "leave draft_sink out, or use llama-tiny",
        )


def _check_sampling(case: Case, origin: str) -> None:
    """Raise InputError for settings that SGLang refuses when it starts, or would silently leave out."""
    settings = case.engine.sglang
    if settings.rejection_sampling and case.topk > 1:
        raise _refuse(f"{origin}: rejection_sampling with topk {case.topk}: SGLang has it for chains only", "use topk 1")
    if settings.rejection_sampling and RECIPES[case.model].frozen:
        raise _refuse(
            f"{origin}: rejection_sampling with {case.model}: SGLang keeps no probabilities of such a draft, and ends at the "
            "first request that samples",
            "leave it out",
        )
    if settings.rejection_sampling and (settings.accept_single, settings.accept_acc) != (1, 1):
        raise _refuse(f"{origin}: rejection_sampling with thresholds, which it does not use", "leave one of them out")
    heads = RECIPES[case.model].draft_vocab_size
    if settings.rejection_sampling and heads is not None:
        raise _refuse(
            f"{origin}: rejection_sampling with {case.model}, whose draft knows {heads} tokens and its target more",
            "use a model with one vocabulary, such as llama-eagle3-full",
        )
    for request in case.requests:
        if settings.deterministic and request.sampling is not None and request.sampling.min_p > 0:
            raise _refuse(
                f"{origin}: request {request.id!r} has min_p, and deterministic is true: SGLang's sampler refuses the two",
                "leave one of them out",
            )
        if request.sampling is None or settings.deterministic == (request.sampling.seed is not None):
            continue
        raise _refuse(
            f"{origin}: request {request.id!r} has {'no seed' if settings.deterministic else 'a seed'}, and deterministic is "
            f"{str(settings.deterministic).lower()}",
            "SGLang hashes coins from seeds with engine.sglang.deterministic, and only then: give both or neither",
        )


def _check_tree(case: Case, origin: str) -> None:
    most = count_candidates(case.topk, case.num_steps) + 1
    if case.verify_nodes < 2:
        raise _refuse(f"{origin}: num_draft_tokens {case.verify_nodes}: nothing would be drafted", "use 2 or more")
    if case.topk > 1 and case.verify_nodes > most:
        raise _refuse(
            f"{origin}: num_draft_tokens {case.verify_nodes}: a tree of topk {case.topk} and "
            f"{count(case.num_steps, 'step')} has {most} nodes",
            f"use 2 to {most}; below {case.num_steps + 1} the worker dies of the ledger's small-tree",
        )


def _check_events(case: Case, origin: str) -> None:
    ids = [request.id for request in case.requests]
    if [event.at for event in case.events] != sorted(event.at for event in case.events):
        raise _refuse(f"{origin}: events are not in the order of `at`", "sort them")
    paused = False
    for number, event in enumerate(case.events):
        where = f"{origin}: events[{number}]"
        if (event.kind == "close") != bool(event.session):
            raise _refuse(f"{where}: only a close names a session, and it must", "set or remove `session`")
        if event.kind == "close" and event.session not in case.sessions:
            raise _refuse(f"{where}: no request is of session {event.session!r}", "name one that has requests")
        if (event.kind == "abort") != bool(event.request):
            raise _refuse(f"{where}: only an abort names a request, and it must", "set or remove `request`")
        if event.step and (event.kind != "abort" or event.at):
            raise _refuse(f"{where}: `step` is of an abort that comes inside a step, whose `at` is 0", "remove `step`, or `at`")
        if event.kind == "abort" and event.request not in ids:
            raise _refuse(f"{where}: no request is called {event.request!r}", f"use one of {', '.join(ids)}")
        also = [name for name in ids if name != event.request and name.startswith(event.request)]
        if event.kind == "abort" and also:
            raise _refuse(
                f"{where}: SGLang aborts by prefix, so {event.request!r} would abort {also[0]!r} as well",
                "rename one of the two requests",
            )
        if event.kind in ("pause", "resume"):
            if paused == (event.kind == "pause"):
                raise _refuse(f"{where}: {event.kind}, and the scheduler is {'' if paused else 'not '}paused", "remove it")
            paused = not paused
