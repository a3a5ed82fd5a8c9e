"""Which changed statements ran: those of a source tree (changes.py), and those of patches in memory (patches.py)."""

executed: set[str] = set()  # places of changed statements that ran, here or before the fork

CALL = "_eagletwin_executed"  # the global by which changed code notes that it runs
