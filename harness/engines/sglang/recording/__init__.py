"""Record requests of a server that somebody else started. plugin.py is where SGLang comes in; the judge reads what is left."""
