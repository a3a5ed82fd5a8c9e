"""`eagletwin bench mutants` and `oracle`: what share of one-place faults is seen, of SGLang's worker and of our own judge."""
