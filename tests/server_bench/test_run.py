"""Servers that stream, lie, fail, die and come back: messages, and nothing measured is lost."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.load import load_config
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import ConfigError, ServerError
from medusa_train.evaluation.questions import load_benchmark
from medusa_train.inference.decoding_mode import DecodingMode
from medusa_train.progress import RunProgress
from medusa_train.server_bench.blocks import AskedQuestion, MeasuredServer, ServerBenchmark
from medusa_train.server_bench.report import metrics_table
from medusa_train.server_bench.run import connect, measure_servers, request_settings
from tests import chatml
from tests.fake_server import Reply, completion, error, stream
from tests.server_bench.servers import BenchServer, bench_server, write_questions
from tests.tool_chats import CHAT, TOOL

#: An answer that is not streamed.
WHOLE = json.dumps(completion({}, text="four")).encode()


@pytest.fixture
def pair() -> Iterator[tuple[BenchServer, BenchServer]]:
    with bench_server(heads=True, seconds=0.001) as heads, bench_server(seconds=0.004) as plain:
        yield heads, plain


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_train.server_bench.blocks.LEAST_CONVERSATIONS", 4)


def measure(tmp_path: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """Measure with two concurrencies; returns served.json and what was printed."""
    questions = write_questions(tmp_path / "few.jsonl")
    defaults = [
        "concurrency=[1,2]",
        "max_new_tokens=8",
        "retry_seconds=20",
        f"output_dir={tmp_path / 'out'}",
    ]
    cfg = load_config(EvalConfig, None, [f"bench={questions}", *defaults, *overrides])
    console = Console(width=160, record=True, quiet=False, file=(tmp_path / "console").open("a"))
    try:
        measure_servers(cfg, load_benchmark(cfg.bench), None, "medusa-eval", RunProgress(console))
    finally:
        (tmp_path / "printed").write_text(console.export_text(clear=False))
    return json.loads((tmp_path / "out" / "served.json").read_text()), console.export_text()


def against(heads: BenchServer, plain: BenchServer) -> list[str]:
    return [f"server_url={heads.url}", f"against={plain.url}"]


def test_two_servers_are_measured_in_turns(
    tmp_path: Path, pair: tuple[BenchServer, BenchServer]
) -> None:
    heads, plain = pair
    report, printed = measure(tmp_path, *against(heads, plain))
    cells = {(cell["server"], cell["concurrency"]): cell for cell in report["cells"]}
    assert set(cells) == {("plain", 1), ("heads", 1), ("plain", 2), ("heads", 2)}
    one = cells["heads", 1]
    assert (one["answers"], one["tokens"]) == (8, 40)
    assert one["acceptance"] == [0.6, 0.2]
    assert (one["tokens_per_step"], one["num_speculative_tokens"]) == (1.8, 2)
    assert (one["equal_answers"], one["compared_answers"]) == (8, 8)
    assert cells["plain", 2]["acceptance"] == []
    later = [
        {**one, "session": "later"},
        {**cells["plain", 1], "session": "later", "tokens_per_s": 7.0},
    ]
    assert "| 7.0 |" in metrics_table({**report, "cells": [*report["cells"], *later]}).markdown()
    advice = [
        (one["concurrency"], one["use"] == (one["verdict"] == "wins"))
        for one in report["recommendation"]
    ]
    assert advice == [(1, True), (2, True)]
    assert report["meta"]["notes"] == []
    for name in ("served.md", "served.html", "answers.jsonl"):
        assert (tmp_path / "out" / name).stat().st_size > 500
    assert not (tmp_path / "out" / "blocks.jsonl").exists()
    assert "recommendation" in printed
    body = heads.fake.bodies[-1]
    assert (body["stream"], body["temperature"], body["max_tokens"]) == (True, 0.0, 8)
    assert len({body["cache_salt"] for body in heads.fake.bodies}) > 8
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    page = (tmp_path / "out" / "served.html").read_text()
    assert page.index("<h2>Recommendation</h2>") > page.index("<h2>Run</h2>")


def test_the_server_that_answers_first_changes_from_block_to_block(
    tmp_path: Path, pair: tuple[BenchServer, BenchServer]
) -> None:
    """So neither gains if the machine becomes slower or faster meanwhile."""
    heads, plain = pair
    asked: list[str] = []

    def ask_heads(number: int, body: dict[str, Any]) -> Reply:
        asked.append("heads")
        return None

    def ask_plain(number: int, body: dict[str, Any]) -> Reply:
        asked.append("plain")
        return None

    heads.script, plain.script = ask_heads, ask_plain
    measure(tmp_path, *against(heads, plain), "concurrency=[1]", "warmup=0")  # two blocks
    assert [name for name, _ in groupby(asked)] == ["plain", "heads", "plain"]


def test_a_server_is_warmed_up_by_as_many_requests_as_are_measured_at_a_time(
    tmp_path: Path, pair: tuple[BenchServer, BenchServer]
) -> None:
    _, plain = pair
    plain.seconds = 0.0
    report, _ = measure(tmp_path, f"server_url={plain.url}", "concurrency=[3]", "warmup=1")
    (cell,) = report["cells"]
    assert len(plain.fake.bodies) - cell["answers"] == 3


@pytest.mark.parametrize(
    ("words", "seconds", "key"),
    [
        (["serve=true", "retry_seconds=60"], 5.0, "VLLM_API_KEY"),  # a server here has ended
        (["serve=true", "retry_seconds=2"], 2.0, "VLLM_API_KEY"),
        (["server_url=http://h/v1", "retry_seconds=60", "api_key_env=MINE"], 60.0, "MINE"),
    ],
)
def test_servers_of_this_machine_are_not_asked_again_for_long(
    monkeypatch: pytest.MonkeyPatch, words: list[str], seconds: float, key: str
) -> None:
    servers = Mock()
    monkeypatch.setattr("medusa_train.server_bench.run.Servers", servers)
    connect(load_config(EvalConfig, None, words), "http://h/v1", 1)
    assert servers.call_args.kwargs["retry_seconds"] == seconds
    assert servers.call_args.kwargs["key_variable"] == key


async def measure_block(bench: ServerBenchmark, conversation: AskedQuestion) -> None:
    async with bench.servers:
        await bench.measure([conversation])


def test_a_served_model_gets_the_stop_tokens_of_its_chats(tmp_path: Path) -> None:
    target_model = chatml.write_target_model(tmp_path / "backbone")
    questions = write_questions(tmp_path / "few.jsonl")
    cfg = load_config(EvalConfig, None, [f"bench={questions}", "serve=true"])
    paths = resolve_model(None, str(target_model), None)
    parameters = request_settings(cfg, DecodingMode(), paths)
    question = load_benchmark(cfg.bench).questions[0]
    with bench_server() as server:
        target = MeasuredServer("plain", server.url, "m", is_vllm=True)
        bench = ServerBenchmark(target, connect(cfg, server.url, 1), parameters, seed=1)
        asyncio.run(measure_block(bench, AskedQuestion(question, 0)))
    expected = [chatml.END_OF_TEXT, chatml.IM_END]
    assert server.fake.bodies[-1]["stop_token_ids"] == expected


def test_one_server_alone_gives_figures_and_no_recommendation(tmp_path: Path) -> None:
    with bench_server(heads=True) as server:
        server.metrics = False
        server.models[0]["owned_by"] = "someone"
        report, printed = measure(
            tmp_path, f"server_url={server.url}", "concurrency=2", "acceptance=sampling"
        )
    (cell,) = report["cells"]
    assert (cell["server"], cell["concurrency"], cell["acceptance"]) == ("server", 2, None)
    assert report["recommendation"] == []
    assert "none: there is no measurement without heads" in printed
    assert "no counters of vLLM at /metrics" in report["meta"]["notes"][0]
    header = next(
        line
        for line in (tmp_path / "out" / "served.md").read_text().splitlines()
        if line.startswith("|")
    )
    assert "accepted" not in header
    assert "cache_salt" not in server.fake.bodies[0]
    assert server.fake.bodies[0]["temperature"] == 0.7


def test_each_turn_of_each_repeat_samples_with_a_seed_of_its_own(
    tmp_path: Path, pair: tuple[BenchServer, BenchServer]
) -> None:
    _, plain = pair
    plain.seconds = 0.0
    words = [f"server_url={plain.url}", "concurrency=[2]", "warmup=0"]
    words += ["acceptance=sampling", "temperature=0.5"]
    found = []
    for seed in (1, 2):
        asked = len(plain.fake.bodies)
        report, _ = measure(tmp_path, *words, f"seed={seed}")
        bodies = plain.fake.bodies[asked:]
        found.append({(body["messages"][-1]["content"], body["seed"]) for body in bodies})
        (cell,) = report["cells"]
        assert len({drawn for _, drawn in found[-1]}) == cell["answers"] == len(bodies)
        assert cell["answers"] > len({text for text, _ in found[-1]})
    assert not found[0] & found[1]


def test_a_server_that_drafts_another_number_of_tokens_than_before_is_noted(
    tmp_path: Path, pair: tuple[BenchServer, BenchServer]
) -> None:
    heads, plain = pair
    two_tokens = heads.fake.others["/metrics"]

    def more_tokens(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        status, headers, page = two_tokens(body)
        if len(heads.fake.bodies) > 12:
            page += b'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 1.0\n'
        return status, headers, page

    heads.fake.others["/metrics"] = more_tokens
    report, _ = measure(tmp_path, *against(heads, plain))
    (note,) = report["meta"]["notes"]
    assert note.startswith("heads: num_speculative_tokens changed; delete")


def test_a_block_with_failed_requests_is_measured_again(
    tmp_path: Path, pair: tuple[BenchServer, BenchServer]
) -> None:
    heads, plain = pair
    failures = [20, 21]

    def script(number: int, body: dict[str, Any]) -> Reply:
        return stream(body, end=None) if number in failures else None

    heads.script = script
    report, _ = measure(tmp_path, *against(heads, plain))
    assert len(report["cells"]) == 4
    assert all(cell["answers"] == 8 * cell["concurrency"] for cell in report["cells"])
    assert any("measured again" in note for note in report["meta"]["notes"])


def test_a_block_with_an_unknown_finish_reason_is_measured_again(
    tmp_path: Path, pair: tuple[BenchServer, BenchServer]
) -> None:
    heads, plain = pair

    def script(number: int, body: dict[str, Any]) -> Reply:
        return stream(body, end="insufficient_system_resource") if number == 20 else None

    heads.script = script
    report, _ = measure(tmp_path, *against(heads, plain))
    assert all(cell["answers"] == 8 * cell["concurrency"] for cell in report["cells"])
    (note,) = report["meta"]["notes"]
    assert "unknown finish_reason 'insufficient_system_resource'" in note
    assert note.endswith("measured again")


def test_a_concurrency_that_overloads_the_server_is_left_out(
    tmp_path: Path, pair: tuple[BenchServer, BenchServer]
) -> None:
    heads, plain = pair
    inside = threading.Semaphore(1)

    def overloaded(number: int, body: dict[str, Any]) -> Reply:
        if not inside.acquire(blocking=False):
            return error(429, "queue is full", **{"Retry-After": "0.01"})
        try:
            time.sleep(0.05)
        finally:
            inside.release()
        return None

    heads.script = overloaded
    report, printed = measure(tmp_path, *against(heads, plain))
    assert {cell["concurrency"] for cell in report["cells"]} == {1}
    assert any(
        note.startswith("concurrency 2 was not measured") for note in report["meta"]["notes"]
    )
    assert "queue is full" in printed


def test_a_server_that_dies_keeps_what_was_measured_and_is_resumed(
    tmp_path: Path, pair: tuple[BenchServer, BenchServer]
) -> None:
    heads, plain = pair
    heads.heads = False
    later = 0

    def rejects_then_dies(number: int, body: dict[str, Any]) -> Reply:
        nonlocal later
        if "concurrency 2 was not measured" not in (tmp_path / "console").read_text():
            return error(400, "no") if number >= 8 else None  # after the first block
        later += 1
        return error(502, "bad gateway") if later > 4 else None

    heads.script = rejects_then_dies
    options = [*against(heads, plain), "retry_seconds=0.5", "concurrency=[2,1]", "warmup=0"]
    with pytest.raises(ServerError, match=r"no answer within 0\.5 s; last error: 502"):
        measure(tmp_path, *options)
    log = tmp_path / "out" / "blocks.jsonl"
    assert "the same command resumes" in (tmp_path / "printed").read_text()
    heads.script, heads.heads = lambda number, body: None, True
    asked = len(plain.fake.bodies)
    report, printed = measure(tmp_path, *options)
    assert "resuming an interrupted measurement: 2 blocks" in printed
    no_drafts, again = report["meta"]["notes"]
    assert "count no drafts" in no_drafts
    assert "400 Bad Request: no; measured again" in again
    assert len(report["cells"]) == 4
    assert all(cell["answers"] == 8 * cell["concurrency"] for cell in report["cells"])
    assert len(plain.fake.bodies) - asked == 4 + 8  # answers of the other blocks
    assert not log.exists()


def test_a_measurement_is_resumed_with_equal_settings_only(
    tmp_path: Path, pair: tuple[BenchServer, BenchServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, plain = pair
    found: list[dict[str, Any]] = []

    class Stop(Exception):
        """In place of the measurement."""

    def record(path: Path, settings: dict[str, Any], entry: object) -> None:
        found.append(json.loads(json.dumps(settings)))
        raise Stop

    monkeypatch.setattr("medusa_train.server_bench.run.MeasurementLog", record)
    sampled = [f"server_url={heads.url}", "acceptance=sampling", "temperature=0.5"]
    changes = ["seed=1", "temperature=0.6", "top_p=0.9", "top_k=3", "max_new_tokens=9"]
    changes += ["warmup=3", "chat_template_kwargs={a: 1}", f"against={plain.url}"]
    changes += ["concurrency=[1]", "retry_seconds=3"]
    for change in ["seed=42", *changes]:
        with pytest.raises(Stop):
            measure(tmp_path, *sampled, change)
    first, *others = found
    *different, concurrency, patience = others
    assert all(settings not in found[:n] for n, settings in enumerate(found[: len(different) + 1]))
    assert concurrency == patience == first


@pytest.mark.parametrize(
    ("change", "overrides", "kind", "message"),
    [
        ({}, ["base_model=other"], ConfigError, "does not serve other; its models: m"),
        (
            {"models": [{"id": "a"}, {"id": "b"}]},
            [],
            ConfigError,
            r"lists several models \(a, b\); set base_model",
        ),
        ({"models": []}, [], ConfigError, "set base_model"),
        ({"tokens": -1}, [], ServerError, "does not report the length of streamed answers"),
        ({"tokens": 9000}, [], ServerError, "reports 9000 tokens for an answer of at most 8"),
        (
            {"reply": error(400, "no streams here")},
            [],
            ServerError,
            "rejects requests: 400 .*no streams here",
        ),
        ({"reply": error(401, "who?")}, [], ServerError, "set the environment variable NO_KEY"),
        (
            {"reply": (200, {"content-type": "application/json"}, WHOLE)},
            [],
            ServerError,
            "ignores `stream`",
        ),
        ({}, ["output_dir=~nobody-here/x"], ConfigError, "~nobody-here"),
        ({"plain_drafts": True}, [], ServerError, "start it without --speculative-config"),
    ],
)
def test_servers_that_are_not_what_they_should_be(
    tmp_path: Path,
    pair: tuple[BenchServer, BenchServer],
    change: dict[str, Any],
    overrides: list[str],
    kind: type[Exception],
    message: str,
) -> None:
    heads, plain = pair
    heads.models = change.get("models", heads.models)
    plain.heads = change.get("plain_drafts", False)
    if "tokens" in change:
        heads.script = lambda number, body: stream(body, "a b c", tokens=change["tokens"])
    if "reply" in change:
        heads.script = lambda number, body: change["reply"]
    with pytest.raises(kind, match=message):
        measure(tmp_path, *against(heads, plain), "api_key_env=NO_KEY", *overrides)


def test_a_slow_answer_is_a_fault_and_a_slow_server_ends_the_run(
    tmp_path: Path, pair: tuple[BenchServer, BenchServer]
) -> None:
    heads, plain = pair
    slow = range(4, 5)

    def hang(number: int, body: dict[str, Any]) -> Reply:
        time.sleep(1.0 if number in slow else 0.0)
        return None

    heads.script = hang
    once = [*against(heads, plain), "request_timeout=0.4", "retry_seconds=1", "concurrency=[1]"]
    report, _ = measure(tmp_path, *once)
    assert len(report["cells"]) == 2
    assert any(
        "ReadTimeout" in note and "measured again" in note for note in report["meta"]["notes"]
    )
    slow = range(len(heads.fake.bodies) + 7, 10_000)
    with pytest.raises(ServerError, match=r"no answer within 1 s; last error: ReadTimeout"):
        measure(tmp_path, *once)
    assert "the same command resumes" in (tmp_path / "printed").read_text()


def test_counters_that_vanish_or_fall_are_those_of_no_block(
    tmp_path: Path, pair: tuple[BenchServer, BenchServer]
) -> None:
    heads, plain = pair

    def restart(number: int, body: dict[str, Any]) -> Reply:
        heads.metrics = number != 5  # the last answer of a block
        heads.drafts *= number != 9
        return None

    heads.script = restart
    report, _ = measure(tmp_path, *against(heads, plain), "concurrency=1")
    assert [
        "/metrics did not answer, or its counters fell" in note for note in report["meta"]["notes"]
    ] == [True]
    assert all(cell["drafts"] is not None for cell in report["cells"])
    assert [len(heads.fake.bodies), len(plain.fake.bodies)] == [2 + 8 + 8, 2 + 8]


def test_what_is_suspicious_is_noted(tmp_path: Path, pair: tuple[BenchServer, BenchServer]) -> None:
    heads, plain = pair
    heads.heads = False
    plain.words = 3  # other answers

    def others(number: int, body: dict[str, Any]) -> Reply:
        heads.answered += 100
        return None

    heads.script = others
    report, _ = measure(tmp_path, *against(heads, plain), "concurrency=2")
    no_drafts, others_use_it, no_equal = report["meta"]["notes"]
    assert "heads: /metrics count no drafts; is it served with heads?" in no_drafts
    assert "heads: others use it" in others_use_it
    assert (
        "no greedy answer equals that of the server without heads (heads at concurrency 2)"
        in no_equal
    )


def test_turns_that_do_not_fit_are_skipped_on_both(
    tmp_path: Path, pair: tuple[BenchServer, BenchServer]
) -> None:
    heads, plain = pair

    def short(number: int, body: dict[str, Any]) -> Reply:
        if len(body["messages"]) > 1 and body["messages"][0]["content"].startswith("q1"):
            return error(
                400,
                "This model's maximum context length is 10 tokens, your prompt has 99 input tokens",
            )
        return None

    heads.script = short
    report, _ = measure(tmp_path, *against(heads, plain), "concurrency=1")
    cells = {cell["server"]: cell for cell in report["cells"]}
    assert (cells["heads"]["skipped_turns"], cells["heads"]["answers"]) == (1, 7)
    assert cells["heads"]["compared_answers"] == 7


def test_answers_of_chats_with_tools_are_asked_for_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(CHAT) + "\n", encoding="utf-8")

    def reject(number: int, body: dict[str, Any]) -> Reply:
        is_second = len(body["messages"]) == 4
        return error(400, "the chat template rejects the chat") if is_second else None

    with bench_server(heads=True) as server:
        server.script = reject
        report, printed = measure(
            tmp_path, f"server_url={server.url}", f"bench={path}", "concurrency=1"
        )
    (cell,) = report["cells"]
    assert (cell["answers"], cell["skipped_turns"]) == (4, 2)
    (note,) = report["meta"]["notes"]
    assert "chats with tools that it rejects are left out" in note
    assert "the chat template rejects the chat" in note
    assert cell["tokens_per_step_of"] == {"with calls": 1.8, "without calls": 1.8}
    assert "without calls" in printed
    bodies = server.fake.bodies
    assert {len(body["messages"]) for body in bodies} == {2, 4, 6}
    assert all((body["tools"], body["tool_choice"]) == ([TOOL], "none") for body in bodies)
    assert bodies[1]["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"n": 1}'
