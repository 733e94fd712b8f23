"""Losses that never hold a [tokens, V] tensor, and the recipes' weighted sums of them."""
