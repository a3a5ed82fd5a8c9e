"""A server's answers, one after another: each is kept in the run folder as it comes, before anything is made of it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from eagletwin.harness.deserved.sending import WAYS, Sent, send
from eagletwin.harness.deserved.server import HttpServer
from eagletwin.harness.deserved.texts import Prompt

from ..options import tell


def answered(
    server: HttpServer,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    new_tokens: int,
    at_once: int,
    sampling: Mapping[str, object],
) -> Iterator[Sent]:
    """Put the prompts to the server in each way. Raises HarnessError where it does not answer."""
    with (folder / "answers.jsonl").open("ab", buffering=0) as file:

        def kept(sent: Sent) -> None:
            file.write(
                msgspec.json.encode({"prompt": sent.number, "way": sent.way, **msgspec.to_builtins(sent.answer)}) + b"\n"
            )

        ids = [prompt.ids for prompt in prompts]
        for number, sent in enumerate(send(server, ids, new_tokens, at_once=at_once, sampling=sampling, kept=kept), 1):
            if number % 10 == 0:
                tell(f"{number} of {len(WAYS) * len(prompts)} answers")
            yield sent
