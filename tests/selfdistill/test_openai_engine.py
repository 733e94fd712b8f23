import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from medusa_train.data.conversation import Message
from medusa_train.errors import ServerError
from medusa_train.selfdistill.answers import DropRules, Request
from medusa_train.selfdistill.distill import distill
from medusa_train.selfdistill.modes import replay
from medusa_train.selfdistill.openai_engine import OpenAIEngine, ServerSampling
from medusa_train.selfdistill.output import OutputWriter
from medusa_train.selfdistill.prompts import Prompt
from medusa_train.selfdistill.run_stats import RunStats
from medusa_train.servers import client as servers_client
from medusa_train.servers.client import OpenAIClient
from medusa_train.training.process_info import free_port
from tests import fake_server
from tests.fake_server import completion, error, serving, short_context
from tests.servers.test_connection import TOO_LONG


@pytest.fixture(autouse=True)
def quick_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_client, "MIN_BACKOFF", 0.01)
    monkeypatch.setattr(servers_client, "MAX_BACKOFF", 0.1)


def engine(url: str | list[str], concurrency: int = 4, retry_seconds: float = 60.0) -> OpenAIEngine:
    server = OpenAIClient(
        url,
        key_variable="OPENAI_API_KEY",
        timeout=20.0,
        retry_seconds=retry_seconds,
        concurrency=concurrency,
    )
    return OpenAIEngine(server, "served", ServerSampling(0.5, 64, 0.9))


def ask(text: str, seed: int = 1) -> Request:
    return Request((Message("user", text),), seed)


def run(out: Path, seeds: list[Prompt], answering: OpenAIEngine) -> RunStats:
    with OutputWriter(out, {"model": "served", "engine": "openai"}) as writer:
        try:
            return distill(
                seeds,
                answering,
                writer,
                mode=partial(replay, random_seed=1, rules=DropRules(drop_looping=False)),
                metadata={"model": "served", "sampling": {"temperature": 0.5}},
            )
        finally:
            answering.close()


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def seeds(count: int, turns: int = 1) -> list[Prompt]:
    return [
        Prompt(f"s{n}", tuple(f"question {n}.{turn}" for turn in range(turns)))
        for n in range(count)
    ]


def test_a_request_says_how_to_draw_and_the_answer_is_read() -> None:
    with serving() as server:
        asking = engine(server.url)
        asking.submit(7, ask("hi", seed=2**40 + 5))
        request_id, answer = asking.next()
        asking.close()
        assert (request_id, answer.text, answer.finish_reason) == (7, "answer to hi", "stop")
        assert (answer.prompt_tokens, answer.completion_tokens) == (10, 4)
        assert server.bodies == [
            {
                "model": "served",
                "messages": [{"role": "user", "content": "hi"}],
                "temperature": 0.5,
                "max_tokens": 64,
                "seed": 5,
                "top_p": 0.9,
            }
        ]


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ("stop", "stop"),
        (None, "possibly cut"),
        ("", "possibly cut"),
        ("eos_token", "stop"),
        ("length", "length"),
        ("content_filter", "refused"),
    ],
)
def test_finish_reasons_are_told_apart(finish: str | None, reason: str) -> None:
    def script(number: int, body: dict) -> tuple[int, dict[str, str], bytes]:
        return (
            200,
            {},
            json.dumps({**completion(body, finish, "half \ud83d"), "usage": None}).encode(),
        )

    with serving(script) as server:
        asking = engine(server.url)
        asking.submit(0, ask("hi"))
        answer = asking.next()[1]
        asking.close()
    assert (answer.text, answer.finish_reason, answer.completion_tokens) == ("half ?", reason, 0)


@pytest.mark.parametrize(
    "finish", ["insufficient_system_resource", "error", "STOP", "zwoing", 7, ["stop"], {}]
)
def test_an_answer_with_an_unknown_finish_reason_is_counted_and_the_others_stay(
    tmp_path: Path, finish: object
) -> None:
    def script(number: int, body: dict) -> fake_server.Reply:
        asked = body["messages"][-1]["content"]
        if asked != "question 7.0":
            return None
        return answer_with({"content": "half"}, finish)

    out = tmp_path / "out.jsonl"
    with serving(script) as server:
        asking = engine(server.url, concurrency=2)
        stats = run(out, seeds(19), asking)
    assert (stats.written, dict(stats.dropped)) == (18, {"failed": 1})
    shown = "\n".join(asking.stats())
    assert f"unknown finish_reason {str(finish)!r}" in shown
    with serving() as server:
        assert run(out, seeds(19), engine(server.url)).written == 1


def test_a_server_that_always_names_an_unknown_finish_reason_ends_the_run(tmp_path: Path) -> None:
    with (
        serving(lambda n, body: answer_with({"content": "half"}, "zwoing")) as server,
        pytest.raises(
            ServerError, match=r"answered none .*unknown finish_reason 'zwoing' \(known: stop"
        ),
    ):
        run(tmp_path / "out.jsonl", seeds(40), engine(server.url, concurrency=2))
    assert len(server.bodies) <= 41
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("length", "context", "reason"),
    [
        (63, 4000, "stop"),
        (64, 4000, "possibly cut"),
        (65, 4000, "possibly cut"),
        (19, 30, "stop"),
        (20, 30, "possibly cut"),  # the context has no room for max_tokens
    ],
)
def test_an_answer_that_stops_exactly_at_the_limit_is_possibly_cut(
    length: int, context: int, reason: str
) -> None:
    rejects = short_context(context, TOO_LONG)

    def script(number: int, body: dict) -> fake_server.Reply:
        status, headers, content = rejects(number, body)
        if status != 200:
            return status, headers, content
        usage = {"prompt_tokens": 10, "completion_tokens": length}
        return 200, {}, json.dumps({**completion(body), "usage": usage}).encode()

    with serving(script) as server:
        models = {"data": [{"id": "served", "max_model_len": context}]}
        server.others["/v1/models"] = lambda body: (200, {}, json.dumps(models).encode())
        asking = engine(server.url)
        asking.submit(0, ask("a b c d e f g h i j"))
        assert asking.next()[1].finish_reason == reason
        asking.close()


@pytest.mark.parametrize(
    ("message", "finish", "reason"),
    [
        ({"content": "<r>\nadd"}, "stop", "possibly cut"),
        ({"content": "<r>\nadd"}, "length", "length"),
        ({"content": " \n<r>add"}, "stop", "possibly cut"),
        ({"content": "<r>\nadd\n</r>\n\nfour"}, "stop", "stop"),
        ({"content": "the tag <r> opens it"}, "stop", "stop"),
        ({"content": "<think>\nadd"}, "stop", "stop"),  # not the tag of this model
        ({"content": None, "reasoning_content": "add"}, None, "possibly cut"),
        ({"content": "", "reasoning_content": "add"}, "length", "length"),
        ({"content": "", "reasoning_content": "add"}, "stop", "only reasoning"),
        ({"content": None, "reasoning": "four"}, "stop", "only reasoning"),
        ({"content": " \n", "reasoning_content": "four"}, "stop", "only reasoning"),
        ({"reasoning_content": "four"}, "stop", "only reasoning"),
        ({"content": None, "reasoning_content": " "}, "stop", "stop"),  # empty
        ({"content": None, "reasoning_content": None}, "stop", "stop"),
    ],
)
def test_an_answer_cut_within_its_reasoning_is_not_whole(
    message: dict, finish: str | None, reason: str
) -> None:
    with serving(lambda n, body: answer_with(message, finish)) as server:
        client = OpenAIClient(
            server.url, key_variable="OPENAI_API_KEY", timeout=20.0, retry_seconds=60.0
        )
        asking = OpenAIEngine(client, "served", ServerSampling(0.5, 64), ("<r>", "</r>"))
        asking.submit(0, ask("hi"))
        assert asking.next()[1].finish_reason == reason
        asking.close()


def answer_with(message: dict, finish: object) -> fake_server.Reply:
    choice = {"message": {"role": "assistant", **message}, "finish_reason": finish}
    return 200, {}, json.dumps({"choices": [choice]}).encode()


def test_reasoning_is_joined_to_the_answer_and_template_variables_are_sent() -> None:
    replies = [
        ({"reasoning_content": "add", "content": "four"}, "<r>\nadd\n</r>\n\nfour"),
        ({"reasoning": "\nadd\n", "content": "\n\nfour"}, "<r>\nadd\n</r>\n\nfour"),
        ({"reasoning_content": None, "content": "four"}, "four"),
        ({"reasoning_content": "add", "content": None}, ""),
    ]

    def script(number: int, body: dict) -> tuple[int, dict[str, str], bytes]:
        message = {"role": "assistant", **replies[number][0]}
        return (
            200,
            {},
            json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode(),
        )

    with serving(script) as server:
        sampling = ServerSampling(0.5, 64, chat_template_kwargs={"enable_thinking": True})
        client = OpenAIClient(
            server.url, key_variable="OPENAI_API_KEY", timeout=20.0, retry_seconds=60.0
        )
        asking = OpenAIEngine(client, "served", sampling, ("<r>", "</r>"))
        for number, (_, expected) in enumerate(replies):
            asking.submit(number, ask("hi"))
            assert asking.next()[1].text == expected
        asking.close()
        assert all(
            body["chat_template_kwargs"] == {"enable_thinking": True} for body in server.bodies
        )
        assert all(body["top_p"] == 1 for body in server.bodies)  # vLLM's default is the model's


@pytest.mark.parametrize(
    "concurrency", [1, 2]
)  # with 1 the first, which is refused, has no other request beside it
def test_chats_that_are_refused_or_too_long_are_dropped_and_the_others_go_on(
    tmp_path: Path, concurrency: int
) -> None:
    def script(number: int, body: dict) -> fake_server.Reply:
        asked = body["messages"][-1]["content"]
        if asked in ("question 0.0", "question 3.0"):
            return error(400, "content policy")
        return error(400, "maximum context length is 10") if asked == "question 4.0" else None

    with serving(script) as server:
        stats = run(tmp_path / "out.jsonl", seeds(6), engine(server.url, concurrency=concurrency))
    assert sorted(ids(tmp_path / "out.jsonl")) == ["s1", "s2", "s5"]
    assert dict(stats.dropped) == {"refused": 2, "context": 1}
    with serving() as server:
        stats = run(tmp_path / "out.jsonl", seeds(6), engine(server.url))
    assert (stats.earlier, stats.written) == (4, 2)


def test_an_answer_that_failed_is_asked_for_again_by_the_next_run(tmp_path: Path) -> None:
    def script(number: int, body: dict) -> fake_server.Reply:
        if body["messages"][-1]["content"] == "question 1.0":
            return error(500, "out of memory")
        # a server that shuts down ends its answers
        aborted = (
            body["messages"][-1]["content"] == "question 0.0"
            and not ended.append(number)
            and len(ended) == 1
        )
        return (200, {}, json.dumps(completion(body, "abort")).encode()) if aborted else None

    out, ended = tmp_path / "out.jsonl", list[int]()
    with serving(script) as server:
        server.seconds = 0.05
        stats = run(out, seeds(40), engine(server.url, concurrency=2, retry_seconds=1.0))
        assert (stats.written, dict(stats.dropped)) == (39, {"failed": 1})
        assert [body["messages"][-1]["content"] for body in server.bodies].count(
            "question 0.0"
        ) == 2
    with serving() as server:
        assert run(out, seeds(40), engine(server.url)).written == 1


@pytest.mark.parametrize(("length", "reason"), [(64, "length"), (63, "context")])
def test_an_answer_that_ends_before_max_new_tokens_reached_the_context(
    length: int, reason: str
) -> None:
    def script(number: int, body: dict) -> tuple[int, dict[str, str], bytes]:
        usage = {"prompt_tokens": 1, "completion_tokens": length}
        return 200, {}, json.dumps({**completion(body, "length"), "usage": usage}).encode()

    with serving(script) as server:
        asking = engine(server.url)
        asking.submit(0, ask("hi"))
        assert asking.next()[1].finish_reason == reason
        asking.close()


@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_server_that_refuses_everything_ends_the_run_and_nothing_is_noted_as_done(
    tmp_path: Path, count: int
) -> None:
    with (
        serving(lambda n, body: error(422, "Unexpected fields")) as server,
        pytest.raises(ServerError, match=r"refused \d+ requests .*Unexpected fields"),
    ):
        run(tmp_path / "out.jsonl", seeds(count), engine(server.url))
    assert list(tmp_path.iterdir()) == []


def start(port: int) -> subprocess.Popen[bytes]:
    """Start the fake server in a process of its own."""
    return subprocess.Popen([sys.executable, fake_server.__file__, str(port), "0.01"])


def test_500_seeds_survive_a_server_that_is_killed_and_restarted(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    port = free_port()
    servers = [start(port)]
    asking = engine(f"http://127.0.0.1:{port}/v1", concurrency=16)
    ended = threading.Event()

    def kill_and_restart() -> None:
        while not out.exists() or len(out.read_bytes().splitlines()) < 150:
            if ended.wait(0.01):
                return
        servers[0].kill()
        servers[0].wait(timeout=30)
        ended.wait(0.5)
        servers.append(start(port))

    killer = threading.Thread(target=kill_and_restart)
    killer.start()
    try:
        stats = run(out, seeds(500), asking)
    finally:
        ended.set()
        killer.join()
        for server in servers:
            server.kill()
    assert sorted(ids(out)) == sorted(seed.id for seed in seeds(500))
    assert (
        len({json.dumps(json.loads(line)["messages"]) for line in out.read_text().splitlines()})
        == 500
    )
    assert asking.server.retries > 0
    assert stats.written == 500


def test_a_run_given_up_by_a_dead_server_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with serving() as server:
        run(out, seeds(20), engine(server.url))
    with pytest.raises(ServerError, match="no answer"):
        run(out, seeds(40), engine(server.url, retry_seconds=0.2))
    with serving() as server:
        stats = run(out, seeds(40), engine(server.url))
    assert (stats.earlier, stats.written) == (20, 20)
    assert len(set(ids(out))) == len(ids(out)) == 40
