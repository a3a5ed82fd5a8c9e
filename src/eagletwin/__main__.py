"""`python -m eagletwin`: the same as the command `eagletwin`."""

from eagletwin.door import main

main()
