"""What a person reads: readers of cases, traces and verdicts. Nothing here judges."""
