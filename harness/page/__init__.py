"""A run as one HTML page, report.html: render.py says what is on it, the modules beside it fill that in, render.py writes
it."""
