"""`eagletwin gpu`: pack, plan and run many cases on a GPU host."""
