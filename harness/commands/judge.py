"""`eagletwin judge TRACE`: judge a recorded trace again, without SGLang."""

from pathlib import Path
from typing import Annotated

import typer

from eagletwin.harness.core.errors import exit_code_of
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.terminal import show, width

from .run_options import JUDGING, run_options


@run_options(JUDGING)
def judge(
    trace: Annotated[Path, typer.Argument(help="A folder with trace.json and trace.safetensors.")],
    *,
    spec: RunSpec,
) -> int:
    """Judge a recorded trace again. Needs no SGLang."""
    from eagletwin.harness.check.argument import argue
    from eagletwin.harness.families.traces import strangers_trace
    from eagletwin.harness.judge.judge import judge as judging

    recorded = strangers_trace(trace)
    verdict = judging(recorded, spec.without, spec.view)
    show(argue(recorded.header, verdict, again=spec.command("judge", trace), trace=recorded, columns=width()))
    return exit_code_of(verdict.status)
