"""Switches of this adapter that are on in this process. A patch names them (core/patch.py), and patches.py puts them on."""

ON: set[str] = set()
