"""Import SGLang, and build the real scheduler of a configuration."""
