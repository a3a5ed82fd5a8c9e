"""What people type. One folder a command: `command.py` has its options, the other files do its work and print it."""
