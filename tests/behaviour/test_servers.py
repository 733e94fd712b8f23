"""Servers measured by medusa-eval, against ones that answer as told and count drafts as vLLM does."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.world import ROOT, Ran, evaluate, read_json, write_tree
from tests.fake_server import error, stream
from tests.server_bench.servers import BenchServer, bench_server, write_questions

FAKE = ROOT / "tests" / "server_bench" / "fake_vllm.py"


def measure(server: BenchServer, bench: Path, out: Path, **keys: Any) -> Ran:
    given = {"concurrency": [1], "max_new_tokens": 8, "warmup": 0, "retry_seconds": 5, **keys}
    return evaluate("--bench", bench, "--server-url", server.url, output_dir=out, **given)


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    return write_questions(tmp_path / "few.jsonl", 4)


def cell(report: dict[str, Any], server: str, concurrency: int = 1) -> dict[str, Any]:
    (found,) = [
        c for c in report["cells"] if (c["server"], c["concurrency"]) == (server, concurrency)
    ]
    return dict(found)


def test_a_server_with_heads_and_one_without(bench: Path, tmp_path: Path) -> None:
    """Rates, acceptance by the counters, equal answers, the ratio and what is recommended."""
    out = tmp_path / "out"
    with bench_server(heads=True, seconds=0.001) as fast, bench_server(seconds=0.006) as slow:
        measure(fast, bench, out, against=slow.url, concurrency=[1, 2]).ok()
        bodies = list(fast.fake.bodies)
    report = read_json(out / "served.json")
    with_heads, plain = cell(report, "heads"), cell(report, "plain")
    assert with_heads["answers"] == plain["answers"]
    assert with_heads["answers"] % 8 == 0  # of 4 questions with two turns, repeated
    assert with_heads["tokens"] == 5 * with_heads["answers"]  # four words and an end
    assert with_heads["drafts"] == 10 * with_heads["answers"]
    assert with_heads["tokens_per_step"] == pytest.approx(1.8)
    assert with_heads["acceptance"] == pytest.approx([0.6, 0.2])
    assert with_heads["num_speculative_tokens"] == 2
    assert plain["tokens_per_step"] in (None, 1.0)
    for found in (with_heads, plain):
        assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["seconds"])
    assert with_heads["ratio"] == pytest.approx(
        with_heads["tokens_per_s"] / plain["tokens_per_s"], rel=0.01
    )
    assert with_heads["ratio"] > 1.3
    low, high = with_heads["ratio_interval"]
    assert low < with_heads["ratio"] < high
    assert with_heads["verdict"] == "wins"
    assert with_heads["equal_answers"] == with_heads["compared_answers"] == with_heads["answers"]
    first = next(advice for advice in report["recommendation"] if advice["concurrency"] == 1)
    assert (first["use"], first["server"], first["num_speculative_tokens"]) == (True, "heads", 2)
    assert report["meta"]["concurrency"] == [1, 2]
    assert {body["temperature"] for body in bodies} == {0}
    assert {body["max_tokens"] for body in bodies} == {8}
    assert all(body["stream"] for body in bodies)
    second = [body for body in bodies if len(body["messages"]) == 3]
    assert len(second) == len(bodies) / 2
    assert second[0]["messages"][1]["role"] == "assistant"
    salts = {body["cache_salt"] for body in bodies}
    assert len(salts) == len(second)  # one a conversation
    page = (out / "served.html").read_text(encoding="utf-8")
    assert f"{with_heads['ratio']:.2f}" in page


def test_heads_that_make_a_server_slower_are_not_recommended(bench: Path, tmp_path: Path) -> None:
    with bench_server(heads=True, seconds=0.006) as slow, bench_server(seconds=0.001) as fast:
        shown = measure(slow, bench, tmp_path / "out", against=fast.url).ok()
    report = read_json(tmp_path / "out" / "served.json")
    found = cell(report, "heads")
    assert (found["verdict"], found["ratio"] < 1) == ("loses", True)
    assert report["recommendation"][0]["use"] is False
    shown.says("off")


def test_heads_that_may_be_slower_are_not_recommended(bench: Path, tmp_path: Path) -> None:
    """They are faster in every other block alone, so the interval of the ratio holds 1."""
    with bench_server(heads=True) as uneven, bench_server(seconds=0.008) as even:

        def script(number: int, body: dict[str, Any]) -> None:
            uneven.seconds = (0.002, 0.014)[number // 4 % 2]  # of the four turns of a block

        uneven.script = script
        shown = measure(uneven, bench, tmp_path / "out", against=even.url).ok()
    report = read_json(tmp_path / "out" / "served.json")
    found = cell(report, "heads")
    low, high = found["ratio_interval"]
    assert low < 1 < high
    assert found["verdict"] == "undecided"
    assert report["recommendation"][0]["use"] is False
    shown.says("off", "not measured to be faster")


def test_other_answers_are_counted(bench: Path, tmp_path: Path) -> None:
    with bench_server(heads=True, words=4) as heads, bench_server(words=3) as plain:
        shown = measure(heads, bench, tmp_path / "out", against=plain.url).ok()
    found = cell(read_json(tmp_path / "out" / "served.json"), "heads")
    assert found["equal_answers"] == 0
    assert found["compared_answers"] == found["answers"] / 2  # later turns have another history
    shown.says("no greedy answer equals")


def test_a_server_alone_and_samples(bench: Path, tmp_path: Path) -> None:
    """Two answers at a time share the time in which both are under way."""
    keys = {"acceptance": "sampling", "temperature": 0.7, "concurrency": [1, 2]}
    with bench_server(seconds=0.01) as server:
        measure(server, bench, tmp_path / "out", **keys).ok()
        assert {body["temperature"] for body in server.fake.bodies} == {0.7}
    first, second = read_json(tmp_path / "out" / "served.json")["cells"]
    assert min(first["answers"], second["answers"]) >= 8
    assert first["seconds"] / first["answers"] > 0.04
    assert first["time_to_first_token_s"]["median"] > 0.04
    assert second["time_to_first_token_s"]["median"] > 0.04
    assert second["tokens_per_s"] > 1.3 * first["tokens_per_s"]


class _Slow(BaseHTTPRequestHandler):
    """Streams who speaks, then two tokens, the first after 60 ms and the second 120 ms later."""

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        content = json.dumps({"data": [{"id": "m"}]}).encode() if found else b""
        self.send_response(200 if found else 404)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        for seconds, chunk in (
            (0.0, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
            (0.06, {"choices": [{"index": 0, "delta": {"content": "a"}}]}),
            (0.12, {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}]}),
            (0.0, {"choices": [], "usage": usage}),
        ):
            time.sleep(seconds)
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_times_to_the_first_token_and_from_one_to_the_next(bench: Path, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        words = ["--bench", bench, "--server-url", url, "--output-dir", tmp_path / "out"]
        evaluate(*words, concurrency=[4], max_new_tokens=8, warmup=0).ok()
        server.shutdown()
    (found,) = read_json(tmp_path / "out" / "served.json")["cells"]
    first, later = (found[f"time_{n}_s"]["median"] for n in ("to_first_token", "per_token"))
    assert 0.06 <= first < later
    assert 0.115 <= later < 0.3
    assert found["tokens"] == 2 * found["answers"]


def test_a_block_with_failures_is_measured_again(bench: Path, tmp_path: Path) -> None:
    with bench_server(heads=True) as heads, bench_server() as plain:
        heads.script = lambda number, body: error(400, "one moment") if number == 3 else None
        shown = measure(heads, bench, tmp_path / "out", against=plain.url).ok()
    shown.says("measured again")
    assert cell(read_json(tmp_path / "out" / "served.json"), "heads")["answers"] % 8 == 0


def test_an_answer_that_its_server_aborted_is_no_answer(bench: Path, tmp_path: Path) -> None:
    """vLLM ends answers so when it is shut down."""
    with bench_server() as server:
        server.script = lambda number, body: (
            stream(body, "half", end="abort") if number == 3 else None
        )
        measure(server, bench, tmp_path / "out").ok().says("measured again")


def test_what_makes_figures_wrong_ends_the_measurement(bench: Path, tmp_path: Path) -> None:
    with bench_server(heads=True) as heads, bench_server(heads=True) as other:
        measure(heads, bench, tmp_path / "a", against=other.url).fails(1, "drafts")
        heads.models.append({"id": "n"})
        measure(heads, bench, tmp_path / "b").fails(2, "several", "base_model")
        measure(heads, bench, tmp_path / "c", base_model="zzz").fails(2, "zzz")
    with bench_server() as gone:
        gone.script = lambda number, body: (
            error(503, "gone", retry_after="0") if number > 4 else None
        )
        measure(gone, bench, tmp_path / "d", retry_seconds=0.1).fails(1)


def test_an_interrupted_measurement_goes_on(bench: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def script(number: int, body: dict[str, Any]) -> Any:
        if number == 30:
            os.kill(os.getpid(), signal.SIGINT)
        return None

    with bench_server(heads=True) as heads, bench_server() as plain:
        heads.script = script
        found = measure(heads, bench, out, against=plain.url, concurrency=[1, 2])
        assert found.code == 130, found.text
        assert (out / "blocks.jsonl").is_file()
        asked = len(heads.fake.bodies)
        heads.script = lambda number, body: None
        shown = measure(heads, bench, out, against=plain.url, concurrency=[1, 2]).ok()
        again = len(heads.fake.bodies) - asked
    shown.says("resuming an interrupted measurement")
    assert not (out / "blocks.jsonl").exists()
    report = read_json(out / "served.json")
    total = sum(cell(report, "heads", n)["answers"] for n in (1, 2))
    assert again < total


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter whose vLLM is a stand-in; what it was started with is in its log."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nif [ "$1" = -c ]; then echo vllm 1.0; exit 0; fi\n'
        f'exec {sys.executable} {FAKE} "$@"\n'
    )
    python.chmod(0o755)
    script = tmp_path / "fake"
    script.write_text("")
    monkeypatch.setenv("VLLM_PYTHON", str(python))
    monkeypatch.setenv("FAKE_VLLM", str(script))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return script


def started(script: Path) -> list[list[str]]:
    return [json.loads(line) for line in script.with_suffix(".log").read_text().splitlines()]


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_vllm_is_started_measured_and_stopped(
    skilled: Callable[[str], Path], vllm: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for path in skilled("eagle3").iterdir():
        if path.name in ("heads", "config.yaml"):
            (run / path.name).symlink_to(path)
    write_tree(run / "tree.json", [(0,)])
    bench = write_questions(tmp_path / "one.jsonl", 1)
    evaluate(
        "--serve", "--bench", bench, "--model", run, concurrency=[1], max_new_tokens=8, warmup=0,
        serve_speculative_tokens=[2], serve_args=["--max-model-len", "256"],
    ).ok()  # fmt: skip
    report = read_json(run / "eval" / "served-one" / "served.json")
    assert {found["server"] for found in report["cells"]} == {"plain", "k=2"}
    assert cell(report, "k=2")["verdict"] in ("wins", "undecided")
    commands = started(vllm)
    assert len(commands) == 2
    drafts = [c for c in commands if "--speculative-config" in c]
    assert len(drafts) == 1
    given = json.loads(drafts[0][drafts[0].index("--speculative-config") + 1])
    assert (given["method"], given["num_speculative_tokens"]) == ("eagle3", 2)
    assert (Path(given["model"]) / "model.safetensors").is_file()
    for words in commands:
        place = words.index("--max-model-len")
        assert words[place + 1] == "256"
    pids = [int(pid) for pid in vllm.with_suffix(".pids").read_text().split()]
    assert not [pid for pid in pids if is_running(pid)]


def test_one_server_at_a_time(model: Path, vllm: Path, tmp_path: Path) -> None:
    """The one without a draft is measured first and last; its faster session counts."""
    bench = write_questions(tmp_path / "one.jsonl", 1)
    evaluate(
        "--serve", "--bench", bench, "--base-model", model, "--draft", "prompt_lookup",
        concurrency=[1], max_new_tokens=8, warmup=0, serve_together=False,
        serve_speculative_tokens=[2, 3], output_dir=tmp_path / "out",
    ).ok()  # fmt: skip
    drafts = ["--speculative-config" in words for words in started(vllm)]
    assert drafts == [False, True, True, False]
    report = read_json(tmp_path / "out" / "served.json")
    plain = [c["tokens_per_s"] for c in report["cells"] if c["server"] == "plain"]
    drafted = [c for c in report["cells"] if c["server"] != "plain"]
    assert (len(plain), len(drafted)) == (2, 2)
    for found in drafted:
        assert found["ratio"] == pytest.approx(found["tokens_per_s"] / max(plain), rel=1e-6)
    assert report["plain"][0]["tokens_per_s"] == max(plain)
    advice = report["recommendation"][0]
    winners = [found for found in drafted if found["verdict"] == "wins"] or drafted
    assert advice["ratio"] == max(found["ratio"] for found in winners)


def test_a_server_that_does_not_start_is_explained(
    skilled: Callable[[str], Path], model: Path, vllm: Path, tmp_path: Path
) -> None:
    vllm.write_text("refuse refuse refuse")
    bench = write_questions(tmp_path / "one.jsonl", 1)
    shown = evaluate(
        "--serve", "--bench", bench, "--base-model", model, "--draft", "prompt_lookup",
        concurrency=[1], max_new_tokens=8, warmup=0, output_dir=tmp_path / "out",
    )  # fmt: skip
    shown.fails(1, "Following weights were not initialized")
