"""Whether the tokens that a worker draws have the right distribution."""
