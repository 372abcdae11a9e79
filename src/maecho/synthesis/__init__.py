"""Inputs made by the server: drawn from moments, painted, or generated. Nobody's data."""
