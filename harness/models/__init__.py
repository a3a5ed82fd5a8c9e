"""Tiny seeded checkpoints (recipes), and where they lie on disk."""
