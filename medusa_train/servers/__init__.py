"""Requests to OpenAI-compatible chat servers: retries and concurrency."""
