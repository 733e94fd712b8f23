"""Requests to OpenAI-compatible chat servers: retries, concurrency and context length"""
