"""A server's answers, one after another: each is kept in the run folder as it comes, before anything is made of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from eagletwin.harness.core.terminal import progress
from eagletwin.harness.deserved.server import WAYS, HttpServer, Sent, Started, send
from eagletwin.harness.deserved.texts import Prompt

from ..options import tell


@dataclass(frozen=True, slots=True)
class Asked:
    """A server, what it says of itself, and what it is asked for: so many new tokens a prompt, so many prompts at once."""

    server: HttpServer
    started: Started
    new_tokens: int
    at_once: int
    temperature: float

    @property
    def by_rejection(self) -> bool:
        """Whether drafts are accepted by chance."""
        return self.started.rejection_sampling and bool(self.temperature)

    @property
    def sampling(self) -> Mapping[str, object]:
        """SGLang's sampling parameters."""
        plain: dict[str, object] = {"temperature": self.temperature, "ignore_eos": False}
        # a server may have others of the checkpoint's for a default
        return plain | {"top_p": 1.0, "top_k": -1} if self.by_rejection else plain


def answered(asked: Asked, prompts: Sequence[Prompt], folder: Path) -> Iterator[Sent]:
    """Put the prompts to the server in each way. Raises HarnessError where it does not answer."""
    total = len(WAYS) * len(prompts)
    with (folder / "answers.jsonl").open("ab", buffering=0) as file, progress("answers", total) as line:

        def kept(sent: Sent) -> None:
            file.write(
                msgspec.json.encode({"prompt": sent.number, "way": sent.way, **msgspec.to_builtins(sent.answer)}) + b"\n"
            )

        ids = [prompt.ids for prompt in prompts]
        sending = send(asked.server, ids, asked.new_tokens, at_once=asked.at_once, sampling=asked.sampling, kept=kept)
        for number, sent in enumerate(sending, 1):
            if number % 10 == 0:
                tell(f"{number} of {total} answers")
            what = f"prompt {sent.number + 1} of {len(prompts)}, {WAYS[sent.way]}"
            line.look(what)  # while it is compared with what the pair deserves
            yield sent
            line.done(what)
