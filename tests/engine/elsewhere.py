"""A known bug in a model other than that of its entry's case."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from eagletwin.cases.ledger import entries_of
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge


def shows_elsewhere(host: Host, folder: Path, entry: str, model: str, changes: Mapping[str, object]) -> None:
    """Assert that the entry's case is equal without the bug and breaks the entry's rule with it, in `model`.

    changes: fields of each request that the case needs there for its features to occur
    """
    (known,) = entries_of(entry)
    requests = tuple(msgspec.structs.replace(request, **changes) for request in known.case.requests)
    case = msgspec.structs.replace(known.case, model=model, requests=requests)
    found = []
    for name, side in (("green", known.green), ("red", known.red)):
        (folder / name).mkdir()
        verdict = judge(host.engine(case, side.patches).run(case, folder / name), view=side.view)
        found.append((verdict.status, verdict.rule))
    assert found == [("equal", ""), ("diverged", known.rule)]
