"""What eagletwin does not drive, whatever SGLang would do with it. Raised while a scheduler is built; reported as eagletwin's
limit."""


class NotDriven(Exception):
    """A configuration, or one of its settings on this release."""
