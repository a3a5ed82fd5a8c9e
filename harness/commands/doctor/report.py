"""What `eagletwin info doctor` prints."""

from collections.abc import Sequence

from eagletwin.harness.page.text import print_table

from .examine import Check


def doctor_table(findings: Sequence[Check]) -> None:
    rows = []
    for finding in findings:
        mark = "[green]ok[/]" if finding.good else ("[red]no[/]" if finding.needed else "[yellow]no[/]")
        rows.append((mark, finding.what, finding.found, "" if finding.good else finding.remedy))
    print_table(("", "what", "found", "remedy"), rows)
