"""Bisection: which release, which commit, which feature a divergence hangs on. search.py, marks.py and delta.py are pure."""
