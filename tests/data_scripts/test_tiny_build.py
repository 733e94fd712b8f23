"""A whole build of a tiny backbone in miniature."""

import json
from pathlib import Path

import build
import pytest
import torch
from tiny_samples import PROBLEM
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_a_build_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "train.jsonl"
    rows = [PROBLEM | {"question": f"Ada has {n} boxes. How many are that?"} for n in range(80)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        "--gsm8k",
        str(source),
        "--smoke",
        "--work",
        str(tmp_path / "work"),
        "--every",
        "2",
        "--polish",
        "1",
        "--steps",
    ]
    assert build.main([*command, "2"]) == 0
    assert build.main([*command, "4"]) == 0  # goes on
    assert "from step 3" in capsys.readouterr().out
    steps = [json.loads(line)["step"] for line in (tmp_path / "work" / "log.jsonl").read_text().splitlines()]
    assert steps == [2, 3, 4, 5]
    made = tmp_path / "work" / "model"
    model = AutoModelForCausalLM.from_pretrained(made)
    assert model.dtype == torch.bfloat16
    assert not model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(made).eos_token_id
    readme = (made / "README.md").read_text()
    assert "Apache-2.0" in readme
    assert "perplexity per byte" in readme
    with pytest.raises(SystemExit, match="another seed"):
        build.main([*command, "6", "--seed", "1"])
