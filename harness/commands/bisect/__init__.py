"""Bisection: which release, commit or feature a divergence depends on."""
