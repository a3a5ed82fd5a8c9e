"""What a test suite uses: the pytest plugin, and what it gives to a test."""
