"""`serve`: SGLang's own HTTP server on a CPU, in the foreground, until it is interrupted."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer
from msgspec.structs import replace

from eagletwin.harness.commands.options import CHANGES, DTYPE, KERNELS, OVERLAP, SOURCE, log_progress, run_options
from eagletwin.harness.core.errors import EXIT_INTERRUPTED, EXIT_UNKNOWN, AlreadyReported, InputError
from eagletwin.harness.core.run_spec import RunSpec

from .serving.messages import Serve

if TYPE_CHECKING:
    from .servers import Server

_DRAFT, _SERVER = "Draft", "Server"
Further = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ARGUMENT", help="Behind `--`: further arguments of SGLang's launch_server, which win.", show_default=False
    ),
]
Target = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Checkpoint of the target.", show_default=False)]
Draft = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Checkpoint of the draft.", show_default=False)]
Model = Annotated[
    str, typer.Option(metavar="RECIPE", help="In place of both: a tiny pair of `eagletwin info models`.", show_default=False)
]
Topk = Annotated[int, typer.Option(metavar="K", min=1, rich_help_panel=_DRAFT, help="Branches of the draft.")]
Steps = Annotated[int, typer.Option(metavar="N", min=1, rich_help_panel=_DRAFT, help="Draft steps a round.")]
Nodes = Annotated[
    int,
    typer.Option(
        metavar="D",
        min=0,
        rich_help_panel=_DRAFT,
        help="Nodes of a tree, its root among them. Of a chain: N + 1.",
        show_default=False,
    ),
]
Page = Annotated[int, typer.Option(metavar="P", min=1, rich_help_panel=_SERVER, help="Tokens a page of the cache.")]
Chunk = Annotated[
    int | None,
    typer.Option(metavar="C", min=1, rich_help_panel=_SERVER, help="Tokens a chunk of a prompt.", show_default="SGLang's"),
]
Port = Annotated[int, typer.Option(metavar="P", min=0, max=65535, rich_help_panel=_SERVER, help="0: a free one.")]

# A server runs on a CPU and has one rank.
SERVED = (OVERLAP, DTYPE)


@run_options(CHANGES, SOURCE, KERNELS, SERVED)
def serve(
    further: Further = None,
    target: Target = None,
    draft: Draft = None,
    model: Model = "",
    topk: Topk = 1,
    num_steps: Steps = 3,
    num_draft_tokens: Nodes = 0,
    page_size: Page = 1,
    chunked_prefill_size: Chunk = None,
    port: Port = 0,
    *,
    spec: RunSpec,
) -> int:
    """Serve a target and its draft by SGLang's own HTTP server, on a CPU.

    For tests and documents of what reads a server, such as the rounds that it uses. Prints `ready URL` when it answers."""
    if topk > 1 and not num_draft_tokens:
        raise InputError(
            f"--topk {topk} without --num-draft-tokens: the size of a tree does not follow from its depth",
            consequence="no server was started",
            remedy=f"give the nodes of the tree, such as --num-draft-tokens {topk * num_steps + 1}",
        )
    if any(word.partition("=")[0] == "--port" for word in further or ()):
        raise InputError(
            "--port among SGLang's own arguments: eagletwin would look for the server at another one",
            consequence="no server was started",
            remedy="give --port before the `--`",
        )
    _check_named(target, draft, model)
    asked = Serve(
        target=str(target.absolute()) if target else "",
        draft=str(draft.absolute()) if draft else "",
        port=port,
        model=model,
        topk=topk,
        num_steps=num_steps,
        num_draft_tokens=num_draft_tokens or num_steps + 1,
        page_size=page_size,
        chunked_prefill_size=chunked_prefill_size,
        patches=spec.patches,
        kernels=spec.kernels,
        mode=spec.mode,
        more=tuple(further or ()),
    )
    with _ended_when_asked():
        return _run(asked, spec)


def _check_named(target: Path | None, draft: Path | None, model: str) -> None:
    """Raises InputError unless there is a recipe of this name, or both folders hold a configuration."""
    from eagletwin.harness.families import RECIPES

    if model and model not in RECIPES:
        raise InputError(
            f"--model {model}: there is no such recipe",
            consequence="no server was started",
            remedy=f"use one of {', '.join(RECIPES)}",
        )
    if (target is None) != (draft is None) or bool(model) == (target is not None):
        raise InputError(
            "a server has a target and a draft, by their folders or by the name of a recipe",
            consequence="no server was started",
            remedy="give --target FOLDER and --draft FOLDER, or --model RECIPE alone",
        )
    for folder in (target, draft):
        if folder is not None and not (folder / "config.json").is_file():
            raise InputError(
                f"{folder} holds no config.json",
                consequence="no server was started",
                remedy="name the folder of a checkpoint, as SGLang's --model-path does",
            )


@contextmanager
def _ended_when_asked() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        log_progress("the server was ended")
        raise AlreadyReported(EXIT_INTERRUPTED) from None


def _run(asked: Serve, spec: RunSpec) -> int:
    """Serve until the server ends by itself, which is an error: Ctrl-C and SIGTERM raise KeyboardInterrupt."""
    from eagletwin.harness.engines.source import resolve

    from .serving.zygote import FrontEnd

    with FrontEnd(resolve(spec.release), spec.mode) as zygote:
        zygote.start()  # it imports SGLang while this process imports torch
        from eagletwin.harness.engines.host import WouldNotStart
        from eagletwin.harness.families.store import checkpoints

        from .servers import Servers

        if asked.model:
            target, draft = checkpoints(asked.model)
            asked = replace(asked, target=str(target), draft=str(draft))
            # as `acceptance` and `judge` take them
            log_progress(f"{asked.model} is --target {shlex.quote(asked.target)} --draft {shlex.quote(asked.draft)}")
        with Servers(zygote) as servers:
            try:
                server = servers.start(asked)
            except WouldNotStart as error:
                if error.log is not None and error.log.is_file():
                    log_progress(error.log.read_text(errors="replace"))
                log_progress(f"error: {error}")
                return EXIT_UNKNOWN
            log_progress("this server is SGLang's own but for:")
            for shim in server.shims:
                log_progress(f"  {shim}")
            print(f"ready {server.url}", flush=True)
            cause = _wait(server)
    log_progress(
        f"error: the server ended: {cause}\n  so:  it answers no more\n"
        "  try: what SGLang printed is above; start it again, or with another configuration"
    )
    return EXIT_UNKNOWN


def _wait(server: "Server") -> str:
    """Print what the server prints, until it ends; what ended it."""
    with server.log.open("rb") as log:
        while True:
            cause = server.ended(0.2)
            _print_rest(log)
            if cause is not None:
                return cause


def _print_rest(log: BinaryIO) -> None:
    if text := log.read().decode(errors="replace"):
        log_progress(text.removesuffix("\n"))
