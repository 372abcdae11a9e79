"""Local training: its settings and losses, and two ways to run it that give the same."""
