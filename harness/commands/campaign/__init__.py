"""`eagletwin campaign`: one search over many processes and machines."""
