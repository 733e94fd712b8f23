"""Losses that never materialize [tokens, V] logits, and the training objectives."""
