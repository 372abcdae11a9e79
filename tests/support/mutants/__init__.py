"""Mutation testing: small deliberate errors in the source, and whether a test notices each (`make mutants`)."""
