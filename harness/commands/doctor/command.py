"""`eagletwin info doctor`: what can run on this machine, and what is missing."""

from dataclasses import asdict

from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_UNKNOWN

from ..as_json import tell_result, with_json
from ..result import DoctorCheckFacts, DoctorFacts


@with_json
def doctor() -> int:
    """Report what can run on this machine, and what is missing."""
    from .examine import examine
    from .report import doctor_table

    checks = examine()
    doctor_table(checks)
    tell_result(DoctorFacts(checks=[DoctorCheckFacts(**asdict(check)) for check in checks]))
    return EXIT_EQUAL if all(check.good or not check.needed for check in checks) else EXIT_UNKNOWN
