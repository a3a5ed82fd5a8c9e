"""`eagletwin diff` and `judge`: what is asked of traces."""
