"""Inputs that the server makes itself: drawn from moments, painted, or generated. They are nobody's data."""
