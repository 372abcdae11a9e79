"""Sums of x xᵀ over many rows x: from batches of rows, and from maps whose patches are the rows."""
