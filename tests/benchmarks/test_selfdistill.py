"""The bench of self-distillation, beside a program in vLLM's place."""

import json
import sys
from pathlib import Path

import pytest
import selfdistill

from tests.evaluation.tiny_model import write_backbone


def test_forced_tokens_are_counted_beside_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_backbone(tmp_path / "backbone")
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "".join(json.dumps({"turns": [f"question {n}", "more?"]}) + "\n" for n in range(6))
    )
    calls: list[tuple[int, bool]] = []

    def rate(paths: object, prompts: list, tokens: int, batch: int, compiled: bool) -> tuple:
        calls.append((batch, compiled))
        return own_rate(paths, prompts, tokens, batch, False)  # type: ignore[arg-type]

    own_rate = selfdistill.own_rate
    monkeypatch.setattr(selfdistill, "own_rate", rate)
    flags = [str(model), "--tokens", "5", "--batches", "1", "4", "--compile"]
    flags += ["--questions", str(questions), "--out", str(tmp_path)]
    assert selfdistill.main(flags) == 0
    assert "vLLM" not in json.loads((tmp_path / "selfdistill.json").read_text())["rates"]
    fake = (
        "import json, sys; n = len(json.load(open(sys.argv[2]))); print('RESULT', [2.0, n *"
        " int(sys.argv[3])])"
    )
    monkeypatch.setattr(selfdistill, "VLLM_SCRIPT", fake)
    assert selfdistill.main([*flags, "--prompts", "4", "--vllm", sys.executable]) == 0
    assert calls == 2 * [(1, False), (1, True), (4, False), (4, True)]
    record = json.loads((tmp_path / "selfdistill.json").read_text())
    assert record["prompts"] == 4
    assert record["rates"]["vLLM"] == {"1": 10.0, "4": 10.0}
    assert all(rate > 0 for by_batch in record["rates"].values() for rate in by_batch.values())
    assert "| vLLM | 10 | 10 |" in (tmp_path / "selfdistill.md").read_text()
    monkeypatch.setattr(selfdistill, "VLLM_SCRIPT", "raise SystemExit('no such device')")
    with pytest.raises(RuntimeError, match="no such device"):
        selfdistill.main([*flags, "--vllm", sys.executable])
