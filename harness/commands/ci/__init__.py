"""`eagletwin ci`: one job of a CI. The ledger and searches on one SGLang, as a summary, annotations and a line of a history."""
