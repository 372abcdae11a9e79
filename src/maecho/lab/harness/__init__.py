"""Runs experiments: clients, their columns, and records that say what they were made of."""
