"""Operators of the nested model: each with a reference in plain torch, and kernels beside it."""
