"""A tokenizer without text, for requests with min_new_tokens: SGLang asks it which tokens end a request, beside those that the
model's configuration and the request name, and with which token the first turn of a session begins. It names none, and a case
has no text that could stop one."""


class Ends:
    """What SGLang reads of a tokenizer there."""

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    additional_stop_token_ids: frozenset[int] | None = None

    def encode(self, text: str, **_options: object) -> list[int]:
        raise NotImplementedError(f"a case has tokens alone, and SGLang wants those of the text {text!r}")

    def decode(self, tokens: list[int], **_options: object) -> str:
        raise NotImplementedError(f"a case has tokens alone, and SGLang wants the text of {tokens}")
