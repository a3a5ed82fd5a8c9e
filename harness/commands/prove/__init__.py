"""`eagletwin prove`: red without a fix, green with it."""
