"""Token trees, their attention masks, and the KV caches in which they are verified."""
