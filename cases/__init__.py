"""What to run: hand-made regressions (the ledger) and drawn cases. Imports no engine."""
