"""Measurements of OpenAI-compatible servers with and without draft heads (`medusa-eval
--server-url`, `--serve`).
"""
