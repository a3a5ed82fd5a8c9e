"""`python -m eagletwin`: the same as the command `eagletwin`."""

from eagletwin.harness.cli import main

main()
