"""Run a case on an engine, judge it, confirm what was found, and report it: what every command and test does."""
