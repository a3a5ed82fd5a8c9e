"""What must not show: chunks, pages, batch mates and the prefix cache change neither output nor stored rows."""

import msgspec
import pytest

from eagletwin.harness.core.case import Case, EngineSettings, SGLangSettings

from ..rows import long
from .conftest import Runner


@pytest.mark.parametrize(("chunk", "page_size"), [(16, 1), (16, 16), (64, 4), *long((16, 4), (64, 1), (64, 16))])
def test_output_and_rounds_do_not_depend_on_pages_chunks_or_the_cache(
    run: Runner, busy_case: Case, page_size: int, chunk: int
) -> None:
    alone = msgspec.structs.replace(
        busy_case,
        page_size=page_size,
        chunked_prefill_size=chunk,
        requests=busy_case.requests[:1],
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=False, max_total_tokens=256)),
    )
    told = []
    for case in (busy_case, alone):
        trace, verdict = run(case)
        assert verdict.status == "equal"
        told.append(
            [
                (record.round, record.numbers["accept_len"], trace.tensor(number, "predicted").tolist())
                for number, record in enumerate(trace.header.records)
                if record.stage == "verify" and record.request == "a"
            ]
        )
    assert told[0] == told[1]
