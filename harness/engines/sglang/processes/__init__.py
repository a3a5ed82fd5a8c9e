"""The processes of an engine: who forks whom, who watches whom, and what is said between them."""
