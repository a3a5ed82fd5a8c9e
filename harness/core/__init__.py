"""The language of the house: cases, traces, verdicts, patches, modes, errors. It imports nothing of ours."""
