"""Symmetric matrices, the simplex quadratic program, matrix equations. Knows no network."""
