"""The wordings of servers; numbers are shortened, the rest is as the servers write it."""

from __future__ import annotations

import pytest

from medusa_train.servers.context_limit import ContextLimit, parse_rejection

VLLM = "This model's maximum context length is 4096 tokens"
CASES = {
    "vllm-messages": (
        f"{VLLM}. However, you requested 2148 tokens (100 in the messages, 2048 in the completion). Please reduce",
        ContextLimit(4096, 100),
    ),
    "vllm-too-large": (
        f"'max_tokens' or 'max_completion_tokens' is too large: 2048. {VLLM} and your request has 2500 input tokens "
        "(2048 > 4096 - 2500).",
        ContextLimit(4096, 2500),
    ),
    "vllm-exact": (
        f"{VLLM}. However, you requested 2048 output tokens and your prompt contains 2500 input tokens, for a total of",
        ContextLimit(4096, 2500),
    ),
    "vllm-lower-bound": (
        f"{VLLM}. However, you requested 2048 output tokens and your prompt contains at least 2049 input tokens, for a",
        ContextLimit(4096),
    ),
    "vllm-prompt": (
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096. Make sure that",
        ContextLimit(4096, 5000),
    ),
    "sglang-total": (
        "Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of "
        "9000 tokens: 8000 tokens from the input messages and 1000 tokens for the completion.",
        ContextLimit(8192, 8000),
    ),
    "sglang-prompt": (
        "The input (61709 tokens) is longer than the model's context length (40960 tokens).",
        ContextLimit(40960, 61709),
    ),
    "tgi-total": (
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 1244 `inputs` tokens and "
        "1000 `max_new_tokens`",
        ContextLimit(2048, 1244),
    ),
    "tgi-prompt": (
        "Input validation error: `inputs` must have less than 1024 tokens. Given: 1168",
        ContextLimit(1024, 1168),
    ),
    "llama.cpp": (
        "request (1407 tokens) exceeds the available context size (256 tokens), try increasing it",
        ContextLimit(256, 1407),
    ),
    "llama.cpp-fields": (
        '{"error":{"code":400,"message":"the request exceeds the available context size",'
        '"type":"exceed_context_size_error","n_prompt_tokens":1407,"n_ctx":256}}',
        ContextLimit(256, 1407),
    ),
    "openai-prompt": (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.",
        ContextLimit(8192, 9000),
    ),
    "openai-answer": (
        "max_tokens is too large: 20000. This model supports at most 16384 completion tokens, whereas you provided",
        ContextLimit(answer=16384),
    ),
    "openai-code": ('{"error": {"code": "context_length_exceeded"}}', ContextLimit()),
    "no-numbers": ("the prompt is too long", ContextLimit()),
}


@pytest.mark.parametrize("name", CASES)
def test_limits_are_read_from_the_wordings_of_servers(name: str) -> None:
    message, expected = CASES[name]
    assert parse_rejection(message) == expected


@pytest.mark.parametrize("message", ["content policy in this context", "Unexpected fields: {'top_k'}", "", "400"])
def test_other_rejections_are_not_about_the_context(message: str) -> None:
    assert parse_rejection(message) is None
