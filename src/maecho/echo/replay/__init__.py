"""Passes over the same batches again and again, in which modules that are final do not run again."""
