"""Sums of x xᵀ over many rows x, which may be the patches of maps, and sums of factored matrices over clients."""
