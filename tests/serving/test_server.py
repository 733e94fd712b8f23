"""`vllm serve` with exported heads, on loopback: its answers, and the drafts that it counts at
/metrics.
"""

import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from medusa_train.progress import RunProgress
from medusa_train.server_bench.blocks import parse_metrics
from medusa_train.server_bench.vllm import SERVED_NAME, VLLMServer, serve_command
from medusa_train.training.process_info import free_port
from tests.serving.conftest import HEADS, MAX_TOKENS, TINY, Chain, Export, environment

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serving"), pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def server(
    vllm_python: str, exports: dict[str, Export], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServer]:
    """A server with the heads with full matrices."""
    port = free_port()
    speculative = {
        "method": "medusa",
        "model": str(exports["full"].directory),
        "num_speculative_tokens": HEADS,
    }
    options = [
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "8",
    ]
    command = serve_command(vllm_python, str(TINY), port, options, speculative)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        one = VLLMServer("heads", command, port, tmp_path_factory.mktemp("server") / "log")
    try:
        one.wait_ready(1200, RunProgress(Console(file=io.StringIO())))
        yield one
    finally:
        one.stop()


def test_the_server_answers_as_plain_decoding_and_counts_what_it_accepts(
    server: VLLMServer, served: dict[str, Any], prompts: list[list[int]]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    for prompt, tokens in zip(prompts, served["plain"]["answers"], strict=True):
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        response = httpx.post(f"{server.url}/completions", json=body, timeout=300, trust_env=False)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == tokenizer.decode(
            tokens, skip_special_tokens=True
        )
    page = httpx.get(server.url.removesuffix("/v1") + "/metrics", timeout=60, trust_env=False).text
    counts, offline = parse_metrics(page), Chain(**served["full"])
    assert counts is not None
    # the same steps as offline; how requests are batched may change the last one of an answer
    assert counts.drafts == pytest.approx(offline.drafts, abs=len(prompts))
    assert list(counts.accepted) == pytest.approx(offline.accepted, abs=len(prompts))
