"""Fake servers with a model list, streams and vLLM's counters, for the measurement of servers."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fake_server import FakeServer, Reply, serving, stream

#: A server at rest; {drafts} and {second} accepted tokens at the second position.
METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {second}
"""
GENERATED = 'vllm:generation_tokens_total{{engine="0",model_name="m"}} {generated}\n'
Script = Callable[[int, dict[str, Any]], Reply]


class BenchServer:
    """A server that answers with `words` words, each after `seconds`, and counts drafts if it has
    heads.

    Attributes:
        script: other replies, as in `FakeServer`.
        metrics: whether it has `/metrics`.
    """

    def __init__(self, fake: FakeServer, *, heads: bool, seconds: float, words: int) -> None:
        self.fake, self.heads, self.seconds, self.words = fake, heads, seconds, words
        self.script: Script = lambda number, body: None
        self.metrics = True
        self.models: list[dict[str, Any]] = [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}]
        self.answered = self.drafts = 0
        self.lock = threading.Lock()
        fake.script = self._reply
        fake.others["/v1/models"] = lambda body: (
            200,
            {},
            json.dumps({"data": self.models}).encode(),
        )
        fake.others["/metrics"] = lambda body: self._metrics()
        fake.others["/health"] = lambda body: (200, {}, b"")

    @property
    def url(self) -> str:
        return self.fake.url

    def _reply(self, number: int, body: dict[str, Any]) -> Reply:
        if (scripted := self.script(number, body)) is not None:
            return scripted
        count = min(self.words, body["max_tokens"] - 1)
        time.sleep(self.seconds * count)
        with self.lock:
            self.answered += count + 1
            self.drafts += 10 if self.heads else 0
        return stream(
            body, " ".join(f"{body['messages'][-1]['content'][:2]}{n}" for n in range(count))
        )

    def _metrics(self) -> tuple[int, dict[str, str], bytes]:
        if not self.metrics:
            return 404, {}, b"no"
        with self.lock:
            d = self.drafts
            page = METRICS.format(drafts=d, accepted=0.8 * d, first=0.6 * d, second=0.2 * d)
            return (
                200,
                {},
                ((page if self.heads else "") + GENERATED.format(generated=self.answered)).encode(),
            )


@contextmanager
def bench_server(
    *, heads: bool = False, seconds: float = 0.0, words: int = 4
) -> Iterator[BenchServer]:
    with serving() as fake:
        yield BenchServer(fake, heads=heads, seconds=seconds, words=words)


def write_questions(path: Path, count: int = 4) -> Path:
    questions = [
        {"question_id": n, "category": "c", "turns": [f"q{n} one", f"q{n} two"]}
        for n in range(count)
    ]
    path.write_text(
        "".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8"
    )
    return path
