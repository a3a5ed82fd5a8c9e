"""One browser for all tests of pages. A fixture that modules import is one for each of them, and two cannot run at once."""

from ..browser import chromium  # noqa: F401  a fixture
