import json
from pathlib import Path

import pytest

from medusa_train.data.records import normalize
from medusa_train.selfdistill.output import OutputWriter
from medusa_train.selfdistill.prompts import Prompt, read_prompts
from medusa_train.selfdistill.replay import ChatRequest, GeneratedAnswer, build_mode
from medusa_train.selfdistill.run import RunStats, distill, summary
from tests.chat_files import read_conversations
from tests.selfdistill.fakes import FakeEngine, config, said
from tests.tool_chats import CHAT, TOOL

SEEDS = [
    Prompt("a", ("one", "two")),
    Prompt("b", ("bad",)),
    Prompt("c", ("three", "bad", "four")),
    Prompt("d", ("five",)),
]
SCRIPT = {"bad": said("and so on and so on", "length")}


def run(out: Path, seeds: list[Prompt], engine: FakeEngine) -> RunStats:
    with OutputWriter(out, {"model": "m"}) as writer:
        return distill(
            seeds,
            engine,
            writer,
            mode=build_mode(config(seed=1)),
            metadata={"model": "m", "sampling": {"temperature": 0.0}},
        )


def test_lines_hold_everything_and_train_as_they_stand(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    stats = run(out, SEEDS, FakeEngine(SCRIPT))
    first, second, third = (json.loads(line) for line in out.read_text().splitlines())
    assert list(first) == [
        *["id", "seed_id", "model", "messages", "sampling", "finish_reasons", "token_counts"]
    ]
    assert first == {
        "id": "a",
        "seed_id": "a",
        "model": "m",
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "answer to one"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "answer to two"},
        ],
        "sampling": {"temperature": 0.0},
        "finish_reasons": ["stop", "stop"],
        "token_counts": {"prompt": [10, 10], "completion": [4, 4]},
    }
    assert second["id"] == "c"
    assert second["dropped"] == {"reason": "length", "turns": 2}
    assert third["id"] == "d"
    assert [chat.id for chat in read_conversations(out).conversations] == [
        "a",
        "c",
        "d",
    ]
    assert (stats.written, stats.turns, stats.cut, stats.empty, stats.finished) == (3, 4, 1, 1, 4)
    assert dict(stats.dropped) == {"length": 3}
    assert stats.tokens == 4 * 4 + 2 * 7


def test_it_goes_on_where_it_was_and_the_file_is_the_same(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    run(whole, SEEDS, FakeEngine(SCRIPT))

    class Interrupted(FakeEngine):
        def answer(self, request: ChatRequest) -> GeneratedAnswer:
            if request.messages[-1].content in ("four", "five"):
                raise KeyboardInterrupt
            return super().answer(request)

    with pytest.raises(KeyboardInterrupt):
        run(parts, SEEDS, Interrupted(SCRIPT))
    engine = FakeEngine(SCRIPT)
    stats = run(parts, SEEDS, engine)
    assert parts.read_bytes() == whole.read_bytes()
    assert (stats.earlier, stats.written, len(engine.asked)) == (3, 1, 1)
    assert run(parts, SEEDS, FakeEngine(SCRIPT)).finished == 4
    assert parts.read_bytes() == whole.read_bytes()


def test_a_chat_of_which_an_answer_failed_is_tried_again_as_a_whole(tmp_path: Path) -> None:
    out, chat = tmp_path / "out.jsonl", Prompt("a", ("one", "two"))
    assert run(out, [chat], FakeEngine({"two": said("", "failed")})).empty == 1
    assert not out.exists()
    assert run(out, [chat], FakeEngine()).turns == 2


def test_figures_are_told() -> None:
    stats = RunStats(total=10, earlier=2, written=3, turns=5, tokens=100)
    stats.dropped["length"] += 2
    line = stats.line()
    assert "tokens/s" in line
    assert "dropped turns: 2 length" in line
    rows = list(summary(stats, {}).columns[0].cells)
    assert "done by an earlier run" in rows
    assert "dropped turns: length" in rows
    assert "conversations dropped" not in rows


def test_no_speed_is_shown_if_the_server_counts_no_tokens() -> None:
    names, values = summary(RunStats(total=1, written=1, turns=1), {}).columns
    assert "tokens per second" not in list(names.cells)
    assert "not counted by the server" in list(values.cells)


def test_looping_answers_are_dropped_with_a_warning_and_a_reason(tmp_path: Path) -> None:
    stats = run(
        tmp_path / "out.jsonl",
        SEEDS,
        FakeEngine({"bad": said("and so on and so on and so " * 4, "length")}),
    )
    assert (stats.looping, dict(stats.dropped)) == (2, {"looping": 3})
    warning = stats.looping_warning(dropped=True)
    assert warning is not None
    assert warning.startswith("warning: 2 answers (33%) loop and were dropped; greedy")
    assert "heads would learn to repeat" in str(stats.looping_warning(dropped=False))
    assert RunStats(total=9, written=99, turns=99, looping=1).looping_warning(dropped=True) is None


def test_an_answer_of_a_chat_with_tools_follows_what_was_recorded(tmp_path: Path) -> None:
    out, chats = tmp_path / "out.jsonl", tmp_path / "chats.jsonl"
    chats.write_text(json.dumps(CHAT) + "\n", encoding="utf-8")
    prompts = read_prompts(chats, turns_per_chat=4)
    run(out, prompts, engine := FakeEngine())
    assert [len(request.messages) for request in engine.asked] == [2, 4, 6]
    _, second, _ = (json.loads(line) for line in out.read_text().splitlines())
    assert second["tools"] == [TOOL]
    assert second["finish_reasons"] == ["recorded", "stop"]
    assert second["messages"][2]["train"] is False
    assert second["messages"][-1] == {"role": "assistant", "content": "answer to result 1"}
    chat = normalize(second, variables=["tools"])
    assert [message.is_target for message in chat.messages] == [None, None, False, None, None]
    assert chat.messages[:4] == (*prompts[1].messages[:2], chat.messages[2], prompts[1].messages[3])
    assert chat.messages[2].parts == prompts[1].messages[2].parts
    assert json.loads(chat.variables) == json.loads(prompts[1].variables)
    run(out, prompts, again := FakeEngine())
    assert not again.asked
