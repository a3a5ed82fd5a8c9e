"""What to run: the ledger of known bugs and drawn cases. Imports no engine."""
