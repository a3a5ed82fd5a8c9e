"""`eagletwin info doctor`: what can run on this machine, and what is missing."""

from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_UNKNOWN

from ..as_json import tell_result, with_json
from ..result import DoctorFacts


@with_json
def doctor() -> int:
    """Report what can run on this machine, and what is missing."""
    from eagletwin.harness.page.text import print_table

    from .examine import examine

    checks, rows = examine(), []
    for check in checks:
        mark = "[green]ok[/]" if check.good else "[red]no[/]" if check.needed else "[yellow]no[/]"
        rows.append((mark, check.what, check.found, "" if check.good else check.remedy))
    print_table(("", "what", "found", "remedy"), rows)
    tell_result(DoctorFacts(checks=checks))
    return EXIT_EQUAL if all(check.good or not check.needed for check in checks) else EXIT_UNKNOWN
