"""`eagletwin doctor`: what can run on this machine, and what is missing."""

from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_UNKNOWN


def doctor() -> int:
    """Report what can run on this machine, and what is missing."""
    from .examine import examine
    from .report import doctor_table

    checks = examine()
    doctor_table(checks)
    return EXIT_EQUAL if all(check.good or not check.needed for check in checks) else EXIT_UNKNOWN
