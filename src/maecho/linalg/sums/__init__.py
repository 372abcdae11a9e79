"""Sums of x xᵀ over rows x, around 0 or a mean, of rows or patches of maps; sums of factored matrices over clients."""
