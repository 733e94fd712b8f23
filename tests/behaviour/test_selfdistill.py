"""medusa-selfdistill: a model's own answers to prompts, here and by a server: what is written, kept,
dropped, retried and resumed.
"""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.processes import Process
from tests.behaviour.scripted import write_scripted_model
from tests.behaviour.seams import decode
from tests.behaviour.test_chats import chat
from tests.behaviour.world import (
    EOS,
    greedy,
    make_chats,
    read_json,
    read_lines,
    render,
    selfdistill,
    train,
    training_keys,
    write_lines,
    write_model,
    write_tree,
)
from tests.fake_server import completion, error, serving, short_context

LENGTH = 24
LOCAL: dict[str, Any] = {"temperature": 0, "dtype": "float32", "max_new_tokens": LENGTH}
KEEP = {"drop_truncated": False, "drop_looping": False}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six prompts: with ids, of two turns, with a system message."""
    records: list[dict[str, Any]] = [
        {"id": f"p{n}", "messages": chat} for n, chat in enumerate(make_chats(5, seed=8))
    ]
    records.append({"id": "sys", "messages": chat("two red", system="five")})
    return write_lines(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", records)


def asked_of(record: dict[str, Any]) -> list[dict[str, str]]:
    return [m for m in record["messages"] if m["role"] != "assistant"]


@pytest.fixture(scope="module")
def expected(prompts: Path, exact_model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Each conversation, answered greedily turn by turn by whole passes of the model."""
    found = []
    for record in read_lines(prompts):
        messages: list[dict[str, str]] = []
        ids, reasons, counts = [], [], []
        for message in asked_of(record):
            messages.append(message)
            if message["role"] == "system":
                continue
            prompt = tokenizer(render(messages), add_special_tokens=False)["input_ids"]
            answer = greedy(exact_model, prompt, LENGTH)
            text = tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            ids.append([token for token in answer if token != EOS])
            reasons.append("stop" if answer[-1] == EOS else "length")
            counts.append((len(prompt), len(answer)))
        found.append(
            {
                "id": record["id"],
                "messages": messages,
                "ids": ids,
                "reasons": reasons,
                "counts": counts,
            }
        )
    return found


def contents(record: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m["role"], m["content"].strip()) for m in record["messages"]]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_conversations_hold_the_models_own_answers(
    batch_size: int,
    prompts: Path,
    model: Path,
    expected: list[dict[str, Any]],
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    out = tmp_path / "own.jsonl"
    words = ["--prompts", prompts, "--model", model, "--output", out]
    selfdistill(*words, **LOCAL, **KEEP, batch_size=batch_size).ok().says("medusa-train")
    written = {record["id"]: record for record in read_lines(out)}
    assert set(written) == {record["id"] for record in expected}
    for record in expected:
        found = written[record["id"]]
        assert contents(found) == contents(record)
        assert found["finish_reasons"] == record["reasons"]
        assert found["token_counts"]["prompt"] == [count for count, _ in record["counts"]]
        assert found["token_counts"]["completion"] == [count for _, count in record["counts"]]
        assert found["sampling"]["temperature"] == 0
        assert found["sampling"]["max_new_tokens"] == LENGTH
        answers = [m for m in found["messages"] if m["role"] == "assistant"]
        for answer, ids in zip(answers, record["ids"], strict=True):
            again = tokenizer(answer["content"], add_special_tokens=False)["input_ids"]
            assert answer.get("token_ids", again) == ids
            assert "token_ids" not in answer or again != ids
    assert read_json(out.with_name("own.settings.json"))
    if batch_size == 1:
        assert [record["id"] for record in read_lines(out)] == [r["id"] for r in expected]


def test_what_is_dropped_and_why(
    prompts: Path, model: Path, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    """An answer that reached the limit is dropped with all later turns."""
    out = tmp_path / "own.jsonl"
    words = ["--prompts", prompts, "--model", model, "--output", out]
    shown = selfdistill(*words, **LOCAL, drop_looping=False).ok()
    written = {record["id"]: record for record in read_lines(out)}
    dropped = {record["id"] for record in read_lines(out.with_name("own.dropped.jsonl"))}
    turns = 0
    for record in expected:
        kept = (record["reasons"] + ["length"]).index("length")
        turns += len(record["reasons"]) - kept
        if kept == 0:
            assert record["id"] in dropped
            assert record["id"] not in written
            continue
        answers = [m for m in written[record["id"]]["messages"] if m["role"] == "assistant"]
        assert len(answers) == kept
    assert dropped
    assert written
    shown.says(f"dropped turns: length │ {turns}")


def test_answers_that_loop_are_dropped(tmp_path: Path, prompts: Path) -> None:
    letters = [" a", " b", " c", " d", " e", " f", " g", " h"]
    model = write_scripted_model(tmp_path / "model", *letters, loops=True)
    words = ["--prompts", prompts, "--model", model, "--output", tmp_path / "o.jsonl"]
    keys = LOCAL | {"max_new_tokens": 60}
    selfdistill(*words, **keys, drop_truncated=False).fails(1, "loop")
    again = tmp_path / "again.jsonl"
    selfdistill(*words[:-1], again, **keys, **KEEP).ok()
    assert read_lines(again)[0]["messages"][1]["content"].split()[:10] == list("abcdefghab")


def test_prompts_are_selected(prompts: Path, model: Path, tmp_path: Path) -> None:
    records = read_lines(prompts)
    doubled = write_lines(
        tmp_path / "p.jsonl", [*records, {**records[0], "id": "copy"}, {"prompt": " "}]
    )

    def answered(**keys: Any) -> list[dict[str, Any]]:
        out = tmp_path / f"{keys}.jsonl"
        words = ["--prompts", doubled, "--model", model, "--output", out]
        selfdistill(*words, **LOCAL, **KEEP, **keys).ok()
        return read_lines(out)

    assert [r["id"] for r in answered()] == [r["id"] for r in records]
    assert [r["id"] for r in answered(limit=2)] == ["p0", "p1"]
    assert len(answered(sample=3)) == 3
    lengths = sorted(
        sum(len(m["content"]) for m in asked_of(r) if m["role"] == "user") for r in records
    )
    assert len(answered(min_chars=lengths[2])) == 4
    assert len(answered(max_chars=lengths[2])) == 3
    one_turn = answered(max_turns=1)
    assert {sum(m["role"] == "user" for m in r["messages"]) for r in one_turn} == {1}


def test_samples_depend_on_their_prompt_and_seed_alone(
    prompts: Path, model: Path, tmp_path: Path
) -> None:
    def texts(name: str, **keys: Any) -> dict[str, Any]:
        out = tmp_path / f"{name}.jsonl"
        words = ["--prompts", prompts, "--model", model, "--output", out]
        selfdistill(*words, **{**LOCAL, "temperature": 0.9, **KEEP, **keys}).ok()
        return {record["id"]: contents(record) for record in read_lines(out)}

    first = texts("a")
    assert texts("b", batch_size=1) == texts("c", batch_size=4) == first
    assert texts("d", seed=1) != first
    assert texts("e", top_k=1) == texts("f", temperature=0)
    few = texts("g", limit=2)
    assert {key: first[key] for key in few} == few


def test_answers_with_the_heads_of_a_run(
    skilled: Callable[[str], Path],
    prompts: Path,
    expected: list[dict[str, Any]],
    exact_model: Any,
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    heads = skilled("medusa") / "heads"
    write_tree(heads.parent / "tree.json", [(0,), (0, 0)])
    try:
        out = tmp_path / "own.jsonl"
        words = ["--prompts", prompts, "--output", out, f"heads={heads.parent}"]
        shown = selfdistill(*words, **LOCAL, **KEEP).ok()
    finally:
        (heads.parent / "tree.json").unlink()
    assert [contents(r) for r in read_lines(out)] == [contents(r) for r in expected]
    asked = []
    for record in expected:
        messages = record["messages"]
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                asked.append(tokenizer(render(messages[:number]))["input_ids"])
    answers = decode(
        exact_model, asked, heads, tree=[(0,), (0, 0)], max_new_tokens=LENGTH, ends=[EOS]
    )
    tokens = sum(len(answer.tokens) - 1 for answer in answers)
    steps = sum(len(answer.accepted) for answer in answers)
    assert steps < tokens
    assert re.search(rf"tokens per step\W+{tokens / steps:.2f}\b", shown.text)


def test_a_run_answers_with_its_adapter(
    model: Path, chats: Path, prompts: Path, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    from tests.behaviour.test_joint_training import LORA

    keys = training_keys(model, chats, tmp_path / "run", max_steps=6, **LORA)
    train(**keys | {"learning_rate": 0.05}).ok()
    out = tmp_path / "own.jsonl"
    selfdistill(
        "--prompts", prompts, "--model", tmp_path / "run", "--output", out, **LOCAL, **KEEP
    ).ok()
    assert [contents(r) for r in read_lines(out)] != [contents(r) for r in expected]


def test_a_model_in_both_roles(prompts: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "own.jsonl"
    words = ["--mode", "selftalk", "--prompts", prompts, "--model", model, "--output", out]
    selfdistill(*words, **{**LOCAL, "temperature": 0.8}, **KEEP, rounds=2).ok()
    for record in read_lines(out):
        said = [m for m in record["messages"] if m["role"] != "system"]
        assert [m["role"] for m in said] == ["user", "assistant"] * (len(said) // 2)
        assert len(said) <= 4
        assert record["mode"] == "selftalk"
    assert {asked_of(r)[-1]["content"] for r in read_lines(out)}


# Resuming


def test_a_cut_line_and_a_killed_run_are_made_whole(
    prompts: Path, model: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "own.jsonl"
    words = ["--prompts", prompts, "--model", model]
    keys = {**LOCAL, "temperature": 0.7, **KEEP, "batch_size": 1}
    selfdistill(*words, "--output", whole, **keys).ok()
    selfdistill(*words, "--output", out, **keys, limit=3).ok()
    content = out.read_bytes()
    out.write_bytes(content[: len(content) - 25])
    selfdistill(*words, "--output", out, **keys).ok().says("resuming after 2 conversations")
    assert out.read_bytes() == whole.read_bytes()
    selfdistill(*words, "--output", out, **keys).ok().says("complete")
    killed = tmp_path / "killed.jsonl"
    written = [f"{key}={value}" for key, value in keys.items()]
    process = Process(tmp_path / "log", "selfdistill", *words, "--output", killed, *written)
    there = process.wait_for(lambda: killed.exists() and killed.read_bytes().count(b"\n") >= 1)
    if there:
        assert process.send(signal.SIGKILL) in (-signal.SIGKILL, 0)
    else:
        assert process.end() == 0
    selfdistill(*words, "--output", killed, **keys).ok()
    assert killed.read_bytes() == whole.read_bytes()


def test_other_settings_are_not_mixed_in_one_file(
    prompts: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "own.jsonl"
    words = ["--prompts", prompts, "--model", model, "--output", out]
    selfdistill(*words, **LOCAL, **KEEP, limit=2).ok()
    before = out.read_bytes()
    for keys in ({"max_new_tokens": 9}, {"temperature": 0.5}, {"seed": 3, "temperature": 0.5}):
        found = selfdistill(*words, **{**LOCAL, **KEEP, **keys})
        assert found.code == 2, found.text
        assert next(iter(keys)) in found.text
    sampled = ["--prompts", prompts, "--model", model, "--output", tmp_path / "sampled.jsonl"]
    keys = {**LOCAL, **KEEP, "temperature": 0.8, "limit": 1}
    selfdistill(*sampled, **keys, top_k=3).ok()
    selfdistill(*sampled, **keys).fails(2, "top_k: 3 in the file")
    other = write_lines(tmp_path / "other.jsonl", [{"id": "p0", "prompt": "another"}])
    found = selfdistill("--prompts", other, *words[2:], **LOCAL, **KEEP)
    assert found.code != 0
    assert out.read_bytes() == before


def test_answers_of_other_weights_are_not_mixed_in_one_file(prompts: Path, tmp_path: Path) -> None:
    """Of a model that was trained again into the same directory."""
    words = ["--prompts", prompts, "--output", tmp_path / "own.jsonl"]
    words += ["--model", write_model(tmp_path / "model", num_hidden_layers=1)]
    selfdistill(*words, **LOCAL, **KEEP, limit=1).ok()
    write_model(tmp_path / "model", num_hidden_layers=1, seed=1)
    selfdistill(*words, **LOCAL, **KEEP, limit=2).fails(2, "with other settings", "weights")


# Servers


def ask(server: Any, prompts: Path, out: Path, *words: Any, **keys: Any) -> Any:
    given = {"retry_seconds": 20, "temperature": 0.5, **keys}
    return selfdistill(
        "--prompts",
        prompts,
        "--model",
        "m",
        "--server-url",
        server.url,
        "--output",
        out,
        *words,
        **given,
    )


def test_requests_and_answers_of_a_server(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right-0123456789")
    monkeypatch.setenv("OTHER_API_KEY", "sk-other-0123456789")
    with serving() as server:
        ask(server, prompts, tmp_path / "o.jsonl", top_p=0.9, top_k=7, max_new_tokens=50).ok()
        assert set(server.authorization) == {"Bearer sk-right-0123456789"}
        bodies = list(server.bodies)
        ask(server, prompts, tmp_path / "p.jsonl", api_key_env="OTHER_API_KEY", limit=1).ok()
        assert server.authorization[-1] == "Bearer sk-other-0123456789"
    for body in bodies:
        assert (body["model"], body["temperature"], body["top_p"]) == ("m", 0.5, 0.9)
        assert (body["top_k"], body["max_tokens"]) == (7, 50)
    written = {record["id"]: record for record in read_lines(tmp_path / "o.jsonl")}
    for record in read_lines(prompts):
        messages = []
        for message in asked_of(record):
            messages.append(message)
            if message["role"] == "user":
                text = f"answer to {message['content']}"
                messages.append({"role": "assistant", "content": text})
        assert written[record["id"]]["messages"] == messages
        prompts_sent = [
            b["messages"] for b in bodies if b["messages"] == messages[: len(b["messages"])]
        ]
        assert len(prompts_sent) == sum(m["role"] == "user" for m in messages)
        assert set(written[record["id"]]["finish_reasons"]) == {"stop"}


def test_without_a_key_none_is_sent(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not OPENAI_API_KEY where another variable is named."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right-0123456789")
    with serving() as server:
        ask(server, prompts, tmp_path / "o.jsonl", api_key_env="NONE_API_KEY", limit=1)
        assert "Bearer sk-right-0123456789" not in server.authorization


def test_failures_of_a_moment_are_retried(prompts: Path, tmp_path: Path) -> None:
    def script(number: int, body: dict[str, Any]) -> Any:
        if number < 4:
            return error([503, 429, 500, 502][number], "later", retry_after="0")
        return None

    with serving(script) as server:
        shown = ask(server, prompts, tmp_path / "o.jsonl", concurrency=2).ok()
    assert len(read_lines(tmp_path / "o.jsonl")) == 6
    shown.says("requests repeated │ 4")


def test_a_server_that_asks_for_a_pause_gets_it(prompts: Path, tmp_path: Path) -> None:
    """By seconds, and by a date."""
    times: list[float] = []

    def script(number: int, body: dict[str, Any]) -> Any:
        times.append(time.time())
        if number == 0:
            return error(503, "busy", Retry_After="1")
        if number == 1:
            return error(429, "busy", Retry_After=formatdate(time.time() + 2, usegmt=True))
        return None

    with serving(script) as server:
        ask(server, prompts, tmp_path / "o.jsonl", limit=1).ok()
    first, second = (after - before for before, after in pairwise(times[:3]))
    assert 0.95 <= first < 9
    assert 0.9 <= second < 9  # dates have whole seconds


FINISHES: dict[str | None, str] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    None: "possibly cut",
    "length": "length",
    "content_filter": "dropped",
    "tool_calls": "stop",
    "function_call": "stop",
}


@pytest.mark.parametrize("finish", FINISHES)
def test_finish_reasons_of_servers(finish: str | None, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "p.jsonl", [{"id": "a", "prompt": "one"}, {"id": "b", "prompt": "two"}]
    )

    def script(number: int, body: dict[str, Any]) -> Any:
        if body["messages"][-1]["content"] == "two":
            return None
        reply = completion(body, finish)
        if finish == "length":
            reply["usage"]["completion_tokens"] = body["max_tokens"]
        return 200, {}, json.dumps(reply).encode()

    with serving(script) as server:
        ask(server, path, tmp_path / "o.jsonl", max_new_tokens=30, drop_truncated=False).ok()
    found = {record["id"]: record["finish_reasons"] for record in read_lines(tmp_path / "o.jsonl")}
    assert found["b"] == ["stop"]
    if FINISHES[finish] == "dropped":
        assert "a" not in found
    else:
        assert found["a"] == [FINISHES[finish]]


@pytest.mark.parametrize(
    ("finish", "reason"), [(None, "possibly cut"), ("length", "context")], ids=["unsaid", "context"]
)
def test_an_answer_that_may_not_be_whole_is_dropped(
    finish: str | None, reason: str, tmp_path: Path
) -> None:
    """The server says nothing of its end, or ended it before the limit."""
    records = [{"id": "a", "prompt": "one"}, {"id": "b", "prompt": "two"}]
    path = write_lines(tmp_path / "p.jsonl", records)

    def script(number: int, body: dict[str, Any]) -> Any:
        if body["messages"][-1]["content"] == "two":
            return None
        return 200, {}, json.dumps(completion(body, finish)).encode()

    with serving(script) as server:
        shown = ask(server, path, tmp_path / "o.jsonl", max_new_tokens=30).ok()
    assert [record["id"] for record in read_lines(tmp_path / "o.jsonl")] == ["b"]
    shown.says(f"dropped turns: {reason} │ 1")


def test_an_aborted_answer_is_asked_for_again_and_an_unknown_end_ends_the_run(
    tmp_path: Path,
) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "one"}])

    def abort(number: int, body: dict[str, Any]) -> Any:
        if number == 0:
            return 200, {}, json.dumps(completion(body, "abort")).encode()
        return None

    with serving(abort) as server:
        ask(server, path, tmp_path / "o.jsonl").ok()
        assert len(server.bodies) == 2

    def unknown(number: int, body: dict[str, Any]) -> Any:
        return 200, {}, json.dumps(completion(body, "whatever")).encode()

    with serving(unknown) as server:
        ask(server, path, tmp_path / "p2.jsonl").fails(1, "whatever")


def test_reasoning_beside_an_answer_is_joined(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "one"}])

    def script(number: int, body: dict[str, Any]) -> Any:
        reply = completion(body, text="four")
        reply["choices"][0]["message"]["reasoning_content"] = "add"
        return 200, {}, json.dumps(reply).encode()

    with serving(script) as server:
        ask(server, path, tmp_path / "o.jsonl", chat_template_kwargs={"enable_thinking": True}).ok()
        assert server.bodies[0]["chat_template_kwargs"] == {"enable_thinking": True}
    (record,) = read_lines(tmp_path / "o.jsonl")
    assert record["messages"][1]["content"] == "<think>\nadd\n</think>\n\nfour"


def test_answers_are_shortened_to_the_servers_context(tmp_path: Path) -> None:
    """Its length is read from the list of models."""
    path = write_lines(
        tmp_path / "p.jsonl", [{"id": "a", "prompt": "one two"}, {"id": "b", "prompt": "x " * 60}]
    )

    with serving(
        short_context(64, "maximum context length is {context} tokens", answer=3)
    ) as server:
        listed = {"data": [{"id": "m", "max_model_len": 64}]}
        server.others["/v1/models"] = lambda body: (200, {}, json.dumps(listed).encode())
        ask(server, path, tmp_path / "o.jsonl", max_new_tokens=500).ok()
        assert server.bodies[-1].get("max_tokens", 0) <= 64
    assert {record["id"] for record in read_lines(tmp_path / "o.jsonl")} == {"a", "b"}


def test_recorded_answers_of_a_chat_with_tools_are_marked(tmp_path: Path) -> None:
    """Each is generated anew after what was recorded before it; the others are not trained."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    recorded = [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c"},
        {"role": "assistant", "content": "four"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    path = write_lines(tmp_path / "p.jsonl", [{"id": "a", "messages": recorded, "tools": tools}])
    with serving() as server:
        ask(server, path, tmp_path / "o.jsonl").ok()
    first, second = sorted(read_lines(tmp_path / "o.jsonl"), key=lambda record: record["id"])
    assert [m["role"] for m in first["messages"]] == ["user", "assistant"]
    assert [m.get("train") for m in first["messages"]] == [None, None]
    assert first["finish_reasons"] == ["stop"]
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert [m.get("train") for m in second["messages"]] == [None, False, None, None]
    assert second["finish_reasons"] == ["recorded", "stop"]
    assert second["messages"][-1]["content"] == "answer to 4"


def test_a_server_that_refuses_everything_ends_the_run(prompts: Path, tmp_path: Path) -> None:
    with serving(lambda number, body: error(400, "no such model")) as server:
        ask(server, prompts, tmp_path / "o.jsonl").fails(1, "no such model")
    detail = (422, {}, json.dumps({"detail": "field required"}).encode())  # as FastAPI says it
    with serving(lambda number, body: detail) as server:
        shown = ask(server, prompts, tmp_path / "o.jsonl").fails(1, "field required")
        assert "detail" not in shown.err
    with serving(lambda number, body: error(401, "who are you")) as server:
        ask(server, prompts, tmp_path / "o.jsonl").fails(1, "who are you")


def test_one_refused_prompt_is_counted_and_asked_again_by_the_next_run(
    prompts: Path, tmp_path: Path
) -> None:
    refuses = True

    def script(number: int, body: dict[str, Any]) -> Any:
        is_it = any(m["role"] == "system" for m in body["messages"])
        return error(400, "not this one") if is_it and refuses else None

    with serving(script) as server:
        ask(server, prompts, tmp_path / "o.jsonl").ok().says("refused")
        assert len(read_lines(tmp_path / "o.jsonl")) == 5
        refuses = False
        ask(server, prompts, tmp_path / "o.jsonl").ok()
    assert len(read_lines(tmp_path / "o.jsonl")) == 6


def test_a_server_that_is_gone_ends_the_run_with_what_is_done(
    prompts: Path, tmp_path: Path
) -> None:
    def script(number: int, body: dict[str, Any]) -> Any:
        if number >= 3:
            return error(503, "gone", retry_after="0")
        return None

    with serving(script) as server:
        ask(server, prompts, tmp_path / "o.jsonl", concurrency=1, retry_seconds=0.2).fails(1)
    done = len(read_lines(tmp_path / "o.jsonl"))
    assert 0 < done < 6
    with serving() as server:
        ask(server, prompts, tmp_path / "o.jsonl").ok().says(f"resuming after {done} conversations")
    assert len(read_lines(tmp_path / "o.jsonl")) == 6


def test_several_servers_and_concurrency(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": f"p{n}"} for n in range(24)])
    with serving(seconds=0.02) as first, serving(seconds=0.02) as second:
        ask(first, path, tmp_path / "o.jsonl", "--server-url", second.url, concurrency=3).ok()
        assert len(first.bodies) + len(second.bodies) == 24
        assert min(len(first.bodies), len(second.bodies)) > 3
        assert first.busiest <= 3 >= second.busiest
        assert max(first.busiest, second.busiest) > 1
    assert len(read_lines(tmp_path / "o.jsonl")) == 24


def test_an_interrupted_run_says_how_to_go_on(prompts: Path, tmp_path: Path) -> None:
    import os

    with serving(seconds=0.2) as server:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        found = ask(server, prompts, tmp_path / "o.jsonl", concurrency=1)
        timer.join()
    found.fails(130, "run the same command again")
    with serving() as server:
        ask(server, prompts, tmp_path / "o.jsonl").ok()
    assert len(read_lines(tmp_path / "o.jsonl")) == 6
