"""Live, found by eagletwin: four bugs of mixed chunks, where requests that run take a token of a chunk.

`mixed-grammar`: with overlap a mixed step masks a running request by a text that lacks the step's before.
A forward with overlap begins before the result of the one before was looked at. Verify has the grammars read those tokens
before it makes its masks. A prefill does not, and needs not for requests whose prompts it reads. With mixed chunks it gives
requests that run a token as well, and their masks are those of the step before. docs/findings/mixed-grammar.

`mixed-memory`: mixed chunks let running requests take the slots that the rest of a prompt needs, and SGLang ends.
A prompt in chunks was let in because the pool held all of it. With each chunk the requests that run join the batch as soon as
what they set aside for two rounds of drafts fits beside this chunk; nothing asks for the chunks that are left. Where these do
not fit any more, the prefill goes on without slots. With windows it waits for some. docs/findings/mixed-memory.

`mixed-state`: with mixed chunks the prefix cache keeps, with a prefix, a state that has read tokens behind it.
Each request that runs takes a token of a chunk. SGLang cuts a prompt's first chunk at a page's end, and a later one inside a
page. The state that is kept of the chunk behind it is that after a whole number of steps of the grid, counted from there: it is
inside a page, too. The prefix cache has whole pages, and takes it for the state at the end of the last one. Who comes to this
prefix goes on from it, and reads tokens twice. docs/findings/mixed-state.

Up to 0.5.22 a mixed step keeps no state at all (issue #39342), which shows first, by the same rule.

`two-chunked`: with mixed chunks and no radix cache a prompt is left half read where two requests of one batch are cut.

The scheduler follows one request that is cut, as the rest of its prompt comes in the next batch. A cut at a page's end can
leave a part of the budget, since each request that runs takes a token of it. A request with `ignore_eos` takes this rest, is
cut as well, and stands in the first one's place: the first counts as read, and goes on from half a prompt. It needs no draft.
"""

from ..entry import Edit, Entry, Grammar, Needs, OnCuda, Patch, Request, SGLangSettings, small_case, small_patch
from .grammar import BY_DISTANCE

_BARRIER = 'fwd_kwargs["grammar_barrier"] = ('
_READ_BEFORE = small_patch(
    "grammars-read-before-a-mixed-step",
    "sglang.srt.managers.scheduler.Scheduler.run_batch",
    _BARRIER,
    f"""if batch.decoding_reqs and batch.forward_mode.is_extend():
    # verify() masks no rows of a prefill batch, so its
    # running requests need their grammars advanced here.
    # Decode batches keep a stale decoding_reqs.
    self._advance_pending_grammar()
{_BARRIER}""",
)

# b's text is `a` when a's prefill gives it one token more, which must be an end and is an `a` again.
GRAMMAR = Entry(
    id="mixed-grammar",
    title="Have grammars read the step before, before a mixed step masks the requests that run",
    rule="grammar.mask",
    buggy="0.5.19 -",
    trigger="overlap, --enable-mixed-chunk, and a request with a grammar that decodes beside another request's prefill",
    needs=Needs(overlap=True),
    remedy=_READ_BEFORE,
    # its second row shows grammar-stride, too, which is mended on both sides
    on_cuda=OnCuda(green=(_READ_BEFORE, BY_DISTANCE), red=(BY_DISTANCE,), until="0.5.23"),
    case=small_case(
        Request(id="a", prompt=(49,), max_new_tokens=1, arrive=1),
        Request(id="b", prompt=(49,), max_new_tokens=2, grammar=Grammar(rules=("a",))),
        exercises=("mixed_step",),
        sglang=SGLangSettings(mixed_chunks=True),
    ),
)


def _leave(match: str, end: str) -> Edit:
    return Edit(
        target="sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        match=match,
        replacement=(
            "chunked, rest = self.chunked_req, 0\n"
            "if chunked is not None and not self.is_hybrid_swa:\n"
            "    rest = -(-len(chunked.full_untruncated_fill_ids) // self.page_size) * self.page_size\n"
            f"    rest -= -(-chunked.{end} // self.page_size) * self.page_size\n"
            "if not running_batch.is_empty() and self.token_to_kv_pool_allocator.check_decode_capacity(\n"
            "    num_tokens=running_batch.new_tokens_required_next_decode() + rest, tree_cache=self.tree_cache\n"
            "):"
        ),
    )


MEMORY = Entry(
    id="mixed-memory",
    title="Leave the slots that the rest of a prompt in chunks needs to it in a mixed step",
    rule="engine.crash",
    buggy="0.5.19 -",
    trigger="--enable-mixed-chunk, no windows, and a prompt in chunks beside requests that run, in a pool they nearly fill",
    remedy=Patch(
        name="mixed-steps-leave-the-rest-of-a-prompt-its-slots",
        edits=(_leave("if not running_batch.is_empty() and running_batch.check_decode_mem():", "extend_end"),),
        otherwise=(_leave("if not running_batch.is_empty():", "extend_range.end"),),  # up to 0.5.21, which do not ask at all
    ),
    case=small_case(
        Request(id="a", prompt=(2,) * 49, max_new_tokens=1, arrive=1),
        Request(id="b", prompt=(1,) * 8, max_new_tokens=4),
        num_steps=3,
        chunked_prefill_size=44,
        exercises=("chunked_prefill",),
        sglang=SGLangSettings(mixed_chunks=True, max_total_tokens=64),
    ),
)


_CUT = "truncated = cand_extend_input_len > _rem_tokens"
# A chunk of less than a page ends inside one all the same, so that the prompt goes on: nothing is kept of the chunks after it.
_KEPT = "sglang.srt.managers.schedule_batch.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend"
_WHOLE_PAGES = Edit(
    target="sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
    match=_CUT,
    replacement=f"""if (
    cand_extend_input_len > _rem_tokens >= self.page_size
    and self.tree_cache.supports_mamba()
    and not getattr(self.tree_cache, "disable", True)
):
    # The prefix cache stores states at page ends. A chunk that begins inside
    # a page would donate a state that has read tokens after its key.
    _rem_tokens = _rem_tokens // self.page_size * self.page_size
{_CUT}""",
)


def _behind_a_page(long_enough: str, begin: str) -> Edit:
    return Edit(target=_KEPT, match=long_enough, replacement=f"{long_enough} and {begin} % self.tree_cache.page_size == 0")


STATE = Entry(
    id="mixed-state",
    title="Cut the later chunks of a model that keeps states at a page's end, as the first one is",
    rule="state.tracked",
    buggy="0.5.19 -",
    trigger="--enable-mixed-chunk, the prefix cache, pages of several tokens, states, and a prompt in three chunks",
    remedy=Patch(
        name="chunks-end-with-pages",
        edits=(_WHOLE_PAGES, _behind_a_page("req.extend_len >= checkpoint_grid", "req.prefix_len")),
        otherwise=(_WHOLE_PAGES, _behind_a_page("req.extend_range.length >= checkpoint_grid", "len(req.prefix_indices)")),
    ),
    # the model keeps a state after each 64 tokens; of the third chunk, 129 to 193, that after row 192, as the one after row 191
    case=small_case(
        Request(id="a", prompt=(1,), max_new_tokens=8),
        Request(id="b", prompt=(7, 5) * 97, max_new_tokens=1, arrive=1),
        model="qwen3-next-nextn",
        page_size=2,
        chunked_prefill_size=66,
        exercises=("mixed_step",),
        sglang=SGLangSettings(mixed_chunks=True, radix_cache=True),
    ),
)

_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"

TWO_CHUNKED = Entry(
    id="two-chunked",
    title="Cut one request a batch where one with ignore_eos follows",
    rule="draft.input_ids",
    buggy="0.5.19 -",
    trigger="mixed chunks, pages of several tokens, no radix cache, and a request with ignore_eos behind one without",
    remedy=small_patch(
        "one-chunked-request",
        f"{_ADDER}.add_one_req_ignore_eos",
        "if self.rem_chunk_tokens <= 0:",
        "if self.rem_chunk_tokens <= 0 or self.new_chunked_req is not None:",
    ),
    recorded="a request is recorded once its prompt was read to the end, which this one's never is",
    case=small_case(
        Request(id="a", prompt=(7,), max_new_tokens=2),
        Request(id="b", prompt=(7, 5, 3), max_new_tokens=1, arrive=1, stop=(1,)),
        Request(id="c", prompt=(7, 5), max_new_tokens=1, arrive=1),
        page_size=2,
        chunked_prefill_size=4,
        exercises=("mixed_step",),
        sglang=SGLangSettings(mixed_chunks=True, radix_cache=False),
    ),
)

ENTRIES = (GRAMMAR, MEMORY, STATE, TWO_CHUNKED)
