"""PR #10846: rows of the draft were reused from the prefix cache by tokens that do not determine them.

The draft's row i depends on x[0..i+1], one token more than the target's. The cache looked for equal tokens x[0..i] alone, so a
prompt that goes on otherwise than the one before it took over a last row that belongs to the other's next token. Since then the
cache compares pairs of neighbouring tokens. It cost acceptance (2.39 fell to 2.26 in the pull request) and never output.
"""

from ..entry import Edit, Entry, Loses, Patch, Request, SGLangSettings, small_case

ENTRY = Entry(
    id="10846",
    title="Reuse a draft row only where the token behind it is the same, too",
    rule="draft.kv",
    buggy="before 0.5.9",
    fixed="0.5.9",
    hidden="0.5.9, the oldest release that eagletwin runs, has the fix",
    trigger="a prefix cache, and a prompt that begins like an earlier one and goes on otherwise",
    loses=Loses("prefix hits", layers=False),
    revert=Patch(
        name="revert-10846",
        edits=(
            Edit(
                target="sglang.srt.mem_cache.kv_cache_builder.build_kv_cache",
                match="is_eagle=spec_algorithm.is_eagle(),",
                replacement="is_eagle=False,",
            ),
        ),
        otherwise=(  # up to 0.5.12.post1 the scheduler builds the cache
            Edit(
                target="sglang.srt.managers.scheduler.Scheduler.init_cache_with_memory_pool",
                match="is_eagle=self.spec_algorithm.is_eagle(),",
                replacement="is_eagle=False,",
            ),
        ),
    ),
    case=small_case(
        Request(id="a", prompt=(7, 19, 5), max_new_tokens=1),
        Request(id="b", prompt=(7, 19, 3), max_new_tokens=1, arrive=2),
        exercises=("radix_hit",),
        sglang=SGLangSettings(radix_cache=True),
    ),
)
