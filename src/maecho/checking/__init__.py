"""Looks at a model and one batch before any work: what would be read, lost and sent, and what is wrong."""
