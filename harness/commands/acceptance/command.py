"""`eagletwin acceptance`: the acceptance that a pair deserves, and what a server gives it."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec.structs import asdict

from eagletwin.harness.core.errors import EXIT_UNKNOWN, InputError
from eagletwin.harness.core.terminal import each

from ..options import JSON, OUT, let_threads_sleep, log_progress, option, run_options

if TYPE_CHECKING:
    from eagletwin.harness.deserved.checkpoint import Prompt
    from eagletwin.harness.deserved.follow import Shape
    from eagletwin.harness.deserved.precision import Pair
    from eagletwin.harness.deserved.server import Server
    from eagletwin.harness.deserved.target import Served

    from .report import Deserved

NUM_STEPS = 3
_PAIR, _DRAFTING, _SERVER = "The pair", "What is drafted, and in which type: without --server", "A running server"
OPTIONS = (
    option(_PAIR, "target", str, ..., "CHECKPOINT", show_default=False)("The target: a folder, or a name on the hub."),
    option(_PAIR, "draft", str, ..., "CHECKPOINT", show_default=False)("The draft: a folder, or a name on the hub."),
    option(_PAIR, "prompts", Path, ..., "FILE", show_default=False)(
        "One prompt a line: text, or JSON with `input_ids` or `prompt`, and what follows it if the file says so."
    ),
    option(_PAIR, "limit", int, 1000, "N", min=1)("Take the first N prompts."),
    option(_PAIR, "new_tokens", int, 128, "N", min=2)("Tokens that follow a prompt, at most."),
    option(_DRAFTING, "target_dtype", Literal["auto", "float32", "bfloat16", "float16"], "auto", "TYPE")(
        "What the target runs in; auto: as it is stored."
    ),
    option(_PAIR, "head_dtype", Literal["float64", "float32"], "float64", "TYPE")("What the reference's head computes in."),
    option(_PAIR, "device", Literal["cpu", "cuda"], "cpu", "DEVICE")("Where both run: cpu or cuda."),
    option(_DRAFTING, "num_steps", int | None, None, "N", min=1)("Draft steps a round.  [default: 3]"),
    option(_DRAFTING, "topk", int | None, None, "K", min=1)("1: chains; more: trees.  [default: 1]"),
    option(_DRAFTING, "num_draft_tokens", int | None, None, "N", min=2)("Nodes of a tree that are verified, the root counted."),
    option(_SERVER, "server", str, "", "URL", show_default=False)(
        "Send the prompts to this server of SGLang or vLLM, and compare rounds that it used with those that the pair deserves."
    ),
    option(_SERVER, "at_once", int, 8, "N", min=1)("Requests at once, where prompts go together."),
    option(_SERVER, "temperature", float, 0.0, "T", min=0.0)("0: greedy decoding."),
    JSON,
    OUT,
)


@run_options(OPTIONS)
def acceptance(
    *,
    target: str,
    draft: str,
    prompts: Path,
    limit: int,
    new_tokens: int,
    target_dtype: "Served",
    head_dtype: str,
    device: str,
    num_steps: int | None,
    topk: int | None,
    num_draft_tokens: int | None,
    server: str,
    at_once: int,
    temperature: float,
    as_json: bool,
    out: Path,
) -> int:
    """Predict the acceptance length of a target and its draft; --server: check that a running server achieves it."""
    _must_agree(server, temperature, of_drafting=bool(num_steps or topk or num_draft_tokens or target_dtype != "auto"))
    let_threads_sleep()
    shape = None if server else _shape(num_steps, topk, num_draft_tokens)
    import torch

    from eagletwin.harness.deserved.checkpoint import checkpoint, read_prompts
    from eagletwin.harness.deserved.draft import check_device, on
    from eagletwin.harness.deserved.precision import load_pair, load_served

    check_device(device)
    asked = read_prompts(prompts, checkpoint(target), limit)
    with on(torch.device(device)):
        if shape is not None:
            pair = load_pair(target, draft, target_dtype, device, getattr(torch, head_dtype))
            return _conclude(_predict_acceptance(pair, shape, asked, new_tokens, (target, draft)), out, as_json=as_json)
        from .against import Prompting, against

        answering = _connect(server)
        said = Prompting(answering, answering.started(), new_tokens, at_once, temperature)
        return against(
            load_served(target, draft, said.started, device, getattr(torch, head_dtype)), asked, said, as_json=as_json, out=out
        )


def _connect(url: str) -> "Server":
    """The server at an address. Raises InputError where neither an SGLang nor a vLLM answers that says what it drafts."""
    from eagletwin.harness.deserved.sglang_server import SGLangServer
    from eagletwin.harness.deserved.vllm_server import VllmServer

    vllm = VllmServer(url)
    info = vllm.get("/server_info?config_format=json", "/get_server_info")
    if "vllm_config" in info:
        return vllm
    if "speculative_algorithm" in info:
        return SGLangServer(url)
    raise InputError(
        f"{url} answers, but not as a server of SGLang or vLLM does",
        consequence="it is not known what it drafts",
        remedy="name the address that SGLang's launch_server, or `vllm serve` with VLLM_SERVER_DEV_MODE=1, listens on",
    )


def _must_agree(server: str, temperature: float, *, of_drafting: bool) -> None:
    """Raises InputError for options that leave each other nothing to say."""
    if server and of_drafting:
        raise InputError(
            "--server was given, and --num-steps, --topk, --num-draft-tokens or --target-dtype",
            consequence="a server drafts and computes as it was started, so the option would say nothing",
            remedy="leave the option out: the server is asked",
        )
    if temperature and not server:
        raise InputError(
            "--temperature was given without --server",
            consequence="nobody samples: the texts are given, or what the target says greedily",
            remedy="give --server, or leave it out",
        )


def _shape(num_steps: int | None, topk: int | None, num_draft_tokens: int | None) -> "Shape":
    from eagletwin.harness.deserved.follow import Shape
    from eagletwin.reference.sizes import count_candidates

    steps, width = num_steps or NUM_STEPS, topk or 1
    if width == 1:
        if num_draft_tokens not in (None, steps + 1):
            raise InputError(
                f"--num-draft-tokens {num_draft_tokens} was given for a chain of {steps} steps",
                consequence=f"a chain has {steps + 1} tokens, the root counted",
                remedy="leave it out, or give --topk",
            )
        return Shape(steps, 1, steps + 1)
    most = count_candidates(width, steps) + 1
    if num_draft_tokens is None or not steps < num_draft_tokens <= most:
        raise InputError(
            f"a tree of topk {width} and num_steps {steps} has {steps + 1} to {most} nodes, and --num-draft-tokens says "
            f"{num_draft_tokens or 'nothing'}",
            consequence="it is not known which nodes are verified",
            remedy="give --num-draft-tokens as the server has it (--speculative-num-draft-tokens)",
        )
    return Shape(steps, width, num_draft_tokens)


def _predict_acceptance(
    pair: "Pair", shape: "Shape", prompts: "list[Prompt]", new_tokens: int, names: tuple[str, str]
) -> "Deserved | None":
    """What the pair deserves on these texts; None if nothing is drafted in them. names: of target and draft"""
    from eagletwin.harness.deserved.misconfiguration import better_read_as
    from eagletwin.harness.deserved.rounds import walk
    from eagletwin.harness.deserved.statistics import Text, figures

    from .report import Deserved

    pair.must_draft(shape)
    texts: list[Text] = []
    layout = off = 0
    for number, prompt in enumerate(each(prompts, "texts"), 1):
        after = prompt.completion
        tokens = [*prompt.ids, *(pair.target.greedy(prompt.ids, new_tokens) if after is None else after)]
        if len(tokens) < len(prompt.ids) + 2:
            continue  # the prefill emits the only token: nothing is drafted
        read, begin = pair.read(tokens), len(prompt.ids)
        off += pair.off_target(read, begin)
        texts.append(Text(tokens, begin, pair.follow(tokens, read.hidden, shape)))
        declared = pair.follow_layout(tokens, read.hidden, shape, begin)
        layout += 0 if declared is None else walk(declared, begin).rounds
        if number % 10 == 0:
            log_progress(f"{number} of {len(prompts)} texts")
    if not texts:
        return None
    found = figures(texts, shape.num_steps)
    return Deserved(
        **asdict(found),
        pair=names,
        shape=shape,
        off_target=off,
        better_read_as=[mistake.name for mistake in better_read_as(pair, shape, texts)],
        rounds_in_sglang=layout or found.rounds,
    )


def _conclude(deserved: "Deserved | None", out: Path, *, as_json: bool) -> int:
    """Print it, and keep it in a run folder; the exit code."""
    if deserved is None:
        print("CANNOT TELL  no text goes on for two tokens behind its prompt, so nothing is drafted in it")
        return EXIT_UNKNOWN
    from eagletwin.harness.core.files import new_run_folder

    from .report import conclude

    return conclude(deserved, new_run_folder(out, "acceptance"), as_json=as_json)
