"""`eagletwin bench`: rates, start-up, growth, searches, acceptance."""
