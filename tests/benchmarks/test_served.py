"""The bench of served heads, with a program in vLLM's place: both modes, the page, and nothing measured twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import served

from tests.evaluation.tiny_model import write_backbone, write_run
from tests.server_bench.servers import write_questions
from tests.server_bench.test_serve import Vllm


@pytest.mark.timeout(600)
def test_both_modes_are_measured_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", write_backbone(tmp_path / "backbone"))
    vllm = Vllm(tmp_path, "ok ok ok oom")  # the second mode fails at first
    for name, value in vllm.environment.items():
        monkeypatch.setenv(name, value)
    flags = [
        str(run),
        "--bench",
        str(write_questions(tmp_path / "few.jsonl")),
        "--limit",
        "4",
        "--concurrency",
        "1",
        "2",
    ]
    flags += ["--max-new-tokens", "8", "--tokens", "1", "2", "--out", str(tmp_path / "out")]
    assert served.main(flags) == 1
    assert "It ran out of memory" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
    assert served.main(flags) == 0
    printed = capfd.readouterr().out
    assert "greedy: " in printed
    assert "served-few is complete" in printed
    assert len(vllm.started) == 3 + 1 + 3
    assert vllm.started[0][-3:] == ["--enforce-eager", "--max-model-len", "1024"]

    text = (tmp_path / "out" / "served.json").read_text()
    record = json.loads(text)
    assert len(text) < 20_000
    assert len(record["greedy"]) == len(record["temperature 0.7"]) == 2 * (1 + 2)
    row = dict(zip(record["columns"], record["greedy"][1], strict=True))
    assert (row["concurrency"], row["server"], row["acceptance"]) == (1, "k=1", [0.6, 0.2])
    assert record["temperature 0.7: run"]["decoding"]["temperature"] == 0.7
    page = (tmp_path / "out" / "served.md").read_text()
    assert page.index("## Greedy") < page.index("## Temperature 0.7") < page.index("## Recommendation")
    assert page.count("| concurrency |") == 4
    assert served.main(flags) == 0  # nothing is left to do
    assert len(vllm.started) == 3 + 1 + 3
