"""What eagletwin does not drive, whatever SGLang would make of it. Raised while a scheduler is built; told as our own limit."""


class NotDriven(Exception):
    """A configuration, or one of its settings on this release."""
