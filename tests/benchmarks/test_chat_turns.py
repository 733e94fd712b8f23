"""The benchmark of chats runs, and both ways give the same answers in float32."""

import json
from pathlib import Path

import chat_turns
import pytest


def test_a_short_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_turns, "QUESTION_TOKENS", 20)
    monkeypatch.setattr(chat_turns, "ANSWER_TOKENS", 6)
    words = ["data/tiny", "--turns", "2", "--rounds", "1", "--dtype", "float32"]
    chat_turns.main([*words, "--out", str(tmp_path)])
    turns = json.loads((tmp_path / "chat_turns.json").read_text())["turns"]
    assert [turn["same_tokens"] for turn in turns] == [True, True]
    assert "| 2 |" in (tmp_path / "chat_turns.md").read_text()
