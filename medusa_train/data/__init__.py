"""Chat data sets: reading, tokenization, caching and batching."""
