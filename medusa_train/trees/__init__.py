"""Token trees, their attention masks, and the key-value caches in which they are verified."""
