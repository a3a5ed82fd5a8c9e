"""The command line: which commands there are."""
