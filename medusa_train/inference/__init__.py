"""Decode with a draft, and choose the tree that it is decoded with."""
