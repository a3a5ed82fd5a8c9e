"""Live, found by eagletwin: with llguidance a token that the grammar refuses ends the server, and all requests with it.

SGLang gives a token where a request allows none. xgrammar refuses it and stays as it was, and the request alone is aborted.
llguidance's matcher has failed from then on, and the next mask raises. With overlap that is the mask of the round that was
launched. Without, it is that of the round behind a prefill, whose token is read after the request's end was looked for.
docs/findings/guidance-refused.
"""

from msgspec.structs import replace

from ..entry import Entry, small_case, small_patch
from .impossible_sampler import FORBIDDEN, GUIDANCE

ENTRY = Entry(
    id="guidance-refused",
    title="Leave a grammar of llguidance as it was when it refuses a token",
    rule="engine.crash",
    buggy="0.5.10 -",
    trigger="grammar-backend llguidance, and a request whose grammar allows only what min_new_tokens or a custom logit "
    "processor forbids",
    remedy=small_patch(
        "guidance-stays-when-it-refuses",
        "sglang.srt.constrained.llguidance_backend.GuidanceGrammar.accept_token",
        "self.ll_matcher.consume_token(token)\n",
        "if not self.ll_matcher.try_consume_tokens([token]):\n"
        "    self._check_err()\n"
        '    raise ValueError(f"the grammar does not allow token {token}")\n',
    ),
    case=small_case(replace(FORBIDDEN, max_new_tokens=2), engine=GUIDANCE, exercises=("impossible",)),
)
