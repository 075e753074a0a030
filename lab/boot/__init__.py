"""Boots real kernels as processes: where they come from, how they start, how they end."""
