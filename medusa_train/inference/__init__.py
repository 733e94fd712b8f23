"""Decode with a draft: proposals, verification, acceptance, batches, text."""
