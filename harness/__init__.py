"""Everything between a case and what a person reads: engines, traces, the judge, proofs, the command line."""
