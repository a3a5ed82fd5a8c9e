"""Bisection: which release, commit or feature a divergence depends on. search.py, marks.py and delta.py are pure."""
