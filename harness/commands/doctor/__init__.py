"""`eagletwin info doctor`: what can run on this machine, and why not."""
