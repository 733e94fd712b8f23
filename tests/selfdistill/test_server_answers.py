import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from medusa_train.data.conversation import REASONING_TAGS, Message, ReasoningTags
from medusa_train.data.records import parse_tool_chat
from medusa_train.errors import ServerError
from medusa_train.selfdistill.output import OutputWriter
from medusa_train.selfdistill.prompts import Prompt
from medusa_train.selfdistill.replay import (
    ChatRequest,
    GeneratedAnswer,
    RunningChat,
    build_mode,
    drop_reason,
)
from medusa_train.selfdistill.run import RunStats, distill
from medusa_train.selfdistill.server_answers import (
    ServerAnswers,
    request_body,
    request_parameters,
)
from medusa_train.servers import client as module
from medusa_train.servers.client import Servers
from medusa_train.training.process_info import free_port
from tests import fake_server
from tests.fake_server import completion, error, serving, short_context
from tests.selfdistill.fakes import config
from tests.servers.test_context import TOO_LONG
from tests.tool_chats import CHAT, call


@pytest.fixture(autouse=True)
def quick_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.1)


PARAMETERS = request_parameters(temperature=0.5, max_new_tokens=64, top_p=0.9)


def client(
    url: str | list[str],
    concurrency: int = 4,
    parameters: dict[str, Any] = PARAMETERS,
    reasoning_tags: ReasoningTags = REASONING_TAGS,
    **options: Any,
) -> ServerAnswers:
    defaults = {"key_variable": "OPENAI_API_KEY", "timeout": 20.0, "retry_seconds": 60.0}
    urls = [url] if isinstance(url, str) else url
    servers = Servers(urls, concurrency=concurrency, **{**defaults, **options})
    return ServerAnswers(servers, "served", parameters, reasoning_tags)


def request(text: str, seed: int = 1) -> ChatRequest:
    return ChatRequest((Message("user", text),), seed)


def ask(asking: ServerAnswers, *requests: ChatRequest) -> list[GeneratedAnswer]:
    """Ask one after the other."""
    answers: list[GeneratedAnswer] = []

    def steps() -> RunningChat:
        for each in requests:
            answers.append((yield each))

    asking.generate(iter([steps()]), lambda answer: None)
    return answers


def run(out: Path, seeds: list[Prompt], asking: ServerAnswers) -> RunStats:
    with OutputWriter(out, {"model": "served", "engine": "openai"}) as writer:
        return distill(
            seeds,
            asking,
            writer,
            mode=build_mode(config(seed=1, drop_looping=False)),
            metadata={"model": "served", "sampling": {"temperature": 0.5}},
        )


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def seeds(count: int, turns: int = 1) -> list[Prompt]:
    return [
        Prompt(f"s{n}", tuple(f"question {n}.{turn}" for turn in range(turns)))
        for n in range(count)
    ]


def test_a_request_says_how_to_draw_and_the_answer_is_read() -> None:
    with serving() as server:
        (answer,) = ask(client(server.url), request("hi", seed=2**40 + 5))
        assert (answer.text, answer.finish_reason) == ("answer to hi", "stop")
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
        (answer,) = ask(client(server.url), request("hi"))
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
        asking = client(server.url, concurrency=2)
        stats = run(out, seeds(19), asking)
    assert (stats.written, dict(stats.dropped)) == (18, {"failed": 1})
    shown = "\n".join(asking.stats())
    assert f"unknown finish_reason {str(finish)!r}" in shown
    with serving() as server:
        assert run(out, seeds(19), client(server.url)).written == 1


def test_a_server_that_always_names_an_unknown_finish_reason_ends_the_run(tmp_path: Path) -> None:
    with (
        serving(lambda n, body: answer_with({"content": "half"}, "zwoing")) as server,
        pytest.raises(
            ServerError, match=r"answered none .*unknown finish_reason 'zwoing' \(known: stop"
        ),
    ):
        run(tmp_path / "out.jsonl", seeds(40), client(server.url, concurrency=2))
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
        (answer,) = ask(client(server.url), request("a b c d e f g h i j"))
        assert answer.finish_reason == reason


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
        asking = client(server.url, reasoning_tags=("<r>", "</r>"))
        assert ask(asking, request("hi"))[0].finish_reason == reason


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
        variables = {"enable_thinking": True}
        parameters = request_parameters(
            temperature=0.5, max_new_tokens=64, chat_template_kwargs=variables
        )
        asking = client(server.url, parameters=parameters, reasoning_tags=("<r>", "</r>"))
        answers = ask(asking, *[request("hi") for _ in replies])
        assert [answer.text for answer in answers] == [expected for _, expected in replies]
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
        stats = run(tmp_path / "out.jsonl", seeds(6), client(server.url, concurrency=concurrency))
    assert sorted(ids(tmp_path / "out.jsonl")) == ["s1", "s2", "s5"]
    assert dict(stats.dropped) == {"refused": 2, "context": 1}
    with serving() as server:
        stats = run(tmp_path / "out.jsonl", seeds(6), client(server.url))
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
        stats = run(out, seeds(40), client(server.url, concurrency=2, retry_seconds=1.0))
        assert (stats.written, dict(stats.dropped)) == (39, {"failed": 1})
        assert [body["messages"][-1]["content"] for body in server.bodies].count(
            "question 0.0"
        ) == 2
    with serving() as server:
        assert run(out, seeds(40), client(server.url)).written == 1


@pytest.mark.parametrize(("length", "reason"), [(64, "length"), (63, "context")])
def test_an_answer_that_ends_before_max_new_tokens_reached_the_context(
    length: int, reason: str
) -> None:
    def script(number: int, body: dict) -> tuple[int, dict[str, str], bytes]:
        usage = {"prompt_tokens": 1, "completion_tokens": length}
        return 200, {}, json.dumps({**completion(body, "length"), "usage": usage}).encode()

    with serving(script) as server:
        assert ask(client(server.url), request("hi"))[0].finish_reason == reason


@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_server_that_refuses_everything_ends_the_run_and_nothing_is_noted_as_done(
    tmp_path: Path, count: int
) -> None:
    with (
        serving(lambda n, body: error(422, "Unexpected fields")) as server,
        pytest.raises(ServerError, match=r"refused \d+ requests .*Unexpected fields"),
    ):
        run(tmp_path / "out.jsonl", seeds(count), client(server.url))
    assert list(tmp_path.iterdir()) == []


def start(port: int) -> subprocess.Popen[bytes]:
    """Start the fake server in a process of its own."""
    return subprocess.Popen([sys.executable, fake_server.__file__, str(port), "0.01"])


def test_500_seeds_survive_a_server_that_is_killed_and_restarted(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    port = free_port()
    servers = [start(port)]
    asking = client(f"http://127.0.0.1:{port}/v1", concurrency=16)
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
    assert asking.servers.retries > 0
    assert stats.written == 500


def test_a_run_given_up_by_a_dead_server_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with serving() as server:
        run(out, seeds(20), client(server.url))
    with pytest.raises(ServerError, match="no answer"):
        run(out, seeds(40), client(server.url, retry_seconds=0.2))
    with serving() as server:
        stats = run(out, seeds(40), client(server.url))
    assert (stats.earlier, stats.written) == (20, 20)
    assert len(set(ids(out))) == len(ids(out)) == 40


# What is sent, and to whom


def test_nothing_of_the_environment_is_sent_but_the_key_of_the_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """openai sends these to whatever server it talks to."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-server")
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "sk-of-an-administrator")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-secret")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-secret")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Token: secret\nAuthorization: Bearer secret")
    with serving() as server:
        ask(client(server.url, key_variable="NONE_API_KEY"), request("hi"))
        monkeypatch.setenv("MY_API_KEY", "sk-of-this-server")
        ask(client(server.url, key_variable="MY_API_KEY"), request("hi"))
    assert server.authorization == [None, "Bearer sk-of-this-server"]
    for headers in server.headers:
        sent = " ".join(headers.values())
        assert "secret" not in sent
        assert "another" not in sent
        assert "administrator" not in sent


def test_a_redirect_is_not_followed_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-this-server")
    with serving() as other:
        moved = (307, {"Location": f"{other.url}/chat/completions"}, b"")
        with (
            serving(lambda n, body: moved) as server,
            pytest.raises(ServerError, match="307") as caught,
        ):
            ask(client(server.url), request("hi"))
    assert f"it redirects to {other.url}/chat/completions" in str(caught.value)
    assert other.bodies == []


def test_servers_on_this_machine_are_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving() as server:
        assert ask(client(server.url), request("hi"))[0].text == "answer to hi"


def test_a_wrong_key_is_not_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-0123456789abcdef"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with (
        serving(lambda n, body: error(401, f"Incorrect API key provided: {key}")) as server,
        pytest.raises(ServerError, match="check the API key in the environment variable") as caught,
    ):
        ask(client(server.url), request("hi"))
    assert key not in str(caught.value)
    assert len(server.bodies) == 1


def test_an_address_without_its_version_is_reported() -> None:
    with (
        serving() as server,
        pytest.raises(ServerError, match=r"(?s)404 .*usually ends with /v1"),
    ):
        ask(client(server.url.removesuffix("/v1")), request("hi"))


# The limit of tokens


def test_a_server_that_wants_max_completion_tokens_gets_them_from_then_on() -> None:
    def script(number: int, body: dict[str, Any]) -> fake_server.Reply:
        if "max_tokens" in body:
            return error(400, "Unsupported parameter: 'max_tokens', use 'max_completion_tokens'")
        return None

    lines: list[str] = []
    with serving(script, seconds=0.05) as server:
        stats = run_chats(client(server.url, concurrency=8, note=lines.append), 16)
    assert stats == 16 * ["answer to question"]
    assert lines == [
        f"server {server.url}: rejects max_tokens; max_completion_tokens takes its place"
    ]
    assert server.bodies[-1]["max_completion_tokens"] == 64
    assert sum("max_tokens" in body for body in server.bodies) <= 8


def run_chats(asking: ServerAnswers, count: int) -> list[str]:
    """Ask `count` questions, as many at a time as there are slots."""
    texts: list[str] = []

    def steps() -> RunningChat:
        answer = yield request("question")
        texts.append(answer.text)

    asking.generate((steps() for _ in range(count)), lambda answer: None)
    return texts


@pytest.mark.parametrize("message", [TOO_LONG, "no"])
def test_an_answer_that_could_exceed_the_stated_context_ends_with_it(message: str) -> None:
    """Also where requests are rejected before the list of models has come."""

    def models(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        time.sleep(0.2)
        listed = {
            "data": [{"id": "other", "max_model_len": 3}, {"id": "served", "max_model_len": 70}]
        }
        return 200, {}, json.dumps(listed).encode()

    with serving(short_context(70, message)) as server:
        server.others["/v1/models"] = models
        asking = client(server.url, concurrency=4)
        answers = ask(asking, request("a b c"), request("word " * 50), request("word " * 70))
    # 20 tokens are left beside 50, and the answer would have 40
    assert [answer.finish_reason for answer in answers[:2]] == ["stop", "context"]
    assert answers[1].completion_tokens == 20
    assert answers[2].finish_reason == ("context" if message == TOO_LONG else "refused")
    assert [body.get("max_tokens") for body in server.bodies[1:3]] == [64, None]


def test_the_context_of_the_only_model_counts_whatever_its_name() -> None:
    with serving(short_context(70, TOO_LONG)) as server:
        listed = {"data": [{"id": "/models/original", "max_model_len": 70}]}
        server.others["/v1/models"] = lambda body: (200, {}, json.dumps(listed).encode())
        (answer,) = ask(client(server.url), request("word " * 50))
    assert answer.completion_tokens == 20


# Faults


def test_pauses_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def record(seconds: float, *arguments: Any) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", record)
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    with serving(lambda n, body: error(500, "broken") if n < 6 else None) as server:
        ask(client(server.url), request("hi"))
    assert pauses == [0.01, 0.02, 0.04, 0.08, 0.1, 0.1]


@pytest.mark.parametrize(
    "reply",
    [
        (200, {}, b"<html>error page</html>"),
        (200, {"Content-Type": "text/html"}, b"<html>error page</html>"),
        (200, {"Content-Type": "application/json"}, b'{"choices": [{"mess'),
        (200, {"Content-Type": "application/json"}, b'{"choices": []}'),
        (200, {"Content-Type": "application/json"}, b"[1]"),
        (200, {}, b'{"choices": [{"message": {"content": [1]}, "finish_reason": "stop"}]}'),
        error(500, "out of memory"),
        error(408, "slow"),
        error(429, "busy"),
        (503, {}, b""),
    ],
)
def test_what_is_no_answer_is_asked_for_again(reply: fake_server.Reply) -> None:
    with serving(lambda n, body: reply if n < 2 else None) as server:
        asking = client(server.url)
        assert ask(asking, request("hi"))[0].text == "answer to hi"
    assert len(server.bodies) == 3
    assert asking.stats() == {"requests repeated": "2"}


def test_an_answer_that_takes_too_long_is_asked_for_again() -> None:
    def script(number: int, body: dict[str, Any]) -> fake_server.Reply:
        time.sleep(1.0 if number == 0 else 0.0)
        return None

    with serving(script) as server:
        asking = client(server.url, timeout=0.3)
        assert ask(asking, request("hi"))[0].text == "answer to hi"
    assert asking.servers.retries == 1


def test_a_pause_that_a_server_asks_for_is_no_longer_than_retries_are_made() -> None:
    with serving(lambda n, body: error(429, "quota", retry_after="3600")) as server:
        started = time.monotonic()
        with pytest.raises(ServerError, match=r"no answer within 0\.3 s; last error: 429"):
            ask(client(server.url, retry_seconds=0.3), request("hi"))
    assert time.monotonic() - started < 5
    assert len(server.bodies) == 2


def test_requests_of_a_dead_server_go_to_another() -> None:
    lines: list[str] = []
    dead = f"http://127.0.0.1:{free_port()}/v1"
    with serving() as server:
        asking = client([dead, server.url], concurrency=2, note=lines.append)
        assert len(run_chats(asking, 40)) == 40
    assert len(server.bodies) == 40
    assert asking.refusals == {}
    (line,) = lines
    assert line.startswith(f"server {dead}: ConnectError")
    assert line.endswith("; retrying for up to 60 s")


def test_a_server_that_answers_again_is_reported_once() -> None:
    lines: list[str] = []
    with serving(lambda n, body: error(500, "broken") if n < 5 else None) as server:
        assert len(run_chats(client(server.url, concurrency=2, note=lines.append), 9)) == 9
    assert [line.removeprefix(f"server {server.url}: ") for line in lines] == [
        "500 Internal Server Error: broken; retrying for up to 60 s",
        "answers again",
    ]


def test_an_overload_is_no_outage() -> None:
    lines: list[str] = []
    with serving(lambda n, body: error(429, "busy") if n < 9 else None) as server:
        assert len(run_chats(client(server.url, concurrency=4, note=lines.append), 9)) == 9
    assert lines == []


def test_an_error_ends_the_run_and_requests_under_way_are_no_faults() -> None:
    def script(number: int, body: dict[str, Any]) -> fake_server.Reply:
        if number == 5:
            return error(403, "blocked")
        time.sleep(0.5 if number > 5 else 0.0)
        return None

    lines: list[str] = []
    with serving(script) as server:
        asking = client(server.url, concurrency=4, note=lines.append)
        with pytest.raises(ServerError, match="blocked"):
            run_chats(asking, 40)
    assert (lines, asking.servers.retries) == ([], 0)
    assert len(server.bodies) < 12


def tool_request() -> ChatRequest:
    chat = parse_tool_chat(CHAT)
    assert chat is not None
    return ChatRequest(chat.messages[:4], 1, variables=chat.variables)


def test_a_chat_with_tools_is_sent_as_openais_clients_do_and_answered_in_text() -> None:
    choice = {
        "message": {"role": "assistant", "content": "<call>"},
        "finish_reason": "stop",
        "token_ids": [7, 8, 2],
    }
    reply = (200, {}, json.dumps({"choices": [choice]}).encode())
    with serving(lambda number, body: reply) as server:
        (answer,) = ask(client(server.url), tool_request())
        (body,) = server.bodies
    assert (answer.text, answer.token_ids) == ("<call>", (7, 8))
    assert body["tools"] == CHAT["tools"]
    assert (body["tool_choice"], body["skip_special_tokens"]) == ("none", False)
    assert body["return_token_ids"] is True
    assert body["messages"][1:] == [
        CHAT["messages"][1],
        {**CHAT["messages"][2], "content": ""},
        CHAT["messages"][3],
    ]


def test_calls_without_ids_get_some_with_their_results() -> None:
    function = {"name": "f", "arguments": {}}
    calls = Message("assistant", "", parts={"tool_calls": [{"function": function}] * 2})
    chat = [calls, Message("tool", "one"), Message("tool", "two"), calls, Message("tool", "three")]
    sent = request_body({}, chat, 0)["messages"]
    assert [call["id"] for call in sent[0]["tool_calls"]] == ["call_0_0", "call_0_1"]
    results = [message["tool_call_id"] for message in sent if message["role"] == "tool"]
    assert results == ["call_0_0", "call_0_1", "call_3_0"]


def test_calls_that_the_server_parsed_are_kept_and_counted() -> None:
    message = {"content": None, "tool_calls": [call(3)], "reasoning_content": "hm"}
    with serving(lambda number, body: answer_with(message, "tool_calls")) as server:
        (answer,) = ask(asking := client(server.url), tool_request())
    assert (answer.text, answer.finish_reason) == ("", "stop")
    assert answer.parts["tool_calls"][0]["function"]["arguments"] == {"n": 3}
    assert answer.parts["reasoning_content"] == "hm"
    assert drop_reason(answer, config()) is None
    assert asking.stats() == {"answers whose calls the server parsed": "1"}


def test_calls_that_cannot_be_read_are_refused() -> None:
    wrong = {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}

    def script(number: int, body: dict) -> fake_server.Reply:
        return answer_with(wrong if "tools" in body else {"content": "Hi"}, "stop")

    with serving(script) as server:
        (answer,) = ask(client(server.url), tool_request())
    assert answer.finish_reason == "refused"


def test_template_variables_of_a_chat_come_before_those_of_the_configuration() -> None:
    parameters = request_parameters(
        temperature=0.0, max_new_tokens=1, chat_template_kwargs={"a": 1, "b": 2}
    )
    variables = {"tools": CHAT["tools"], "b": 3, "c": 4}
    body = request_body(parameters, [Message("user", "Hi")], 0, json.dumps(variables))
    assert body["chat_template_kwargs"] == {"a": 1, "b": 3, "c": 4}
    assert body["tools"] == CHAT["tools"]
    without = request_body(parameters, [Message("user", "Hi")], 0)
    assert without["chat_template_kwargs"] == {"a": 1, "b": 2}
