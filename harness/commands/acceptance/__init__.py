"""`eagletwin acceptance`: the acceptance that a pair deserves, and what a server gives it."""
