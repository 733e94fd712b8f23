"""Merged target models: what a joint run decodes with is what plain transformers loads."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_train.checkpoint.load_model import load_for_decoding
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.data.builtin_templates import TEMPLATES, get_template
from medusa_train.errors import CheckpointError
from medusa_train.export.merged_model import untie_config
from medusa_train.export.write import export_run
from medusa_train.models.lora import Adapter, LoraSpec
from tests.families import random_target_model

TOKENS = torch.tensor([[1, 40, 50, 60, 70, 80]])


def logits(where: Path) -> torch.Tensor:
    """Of the directory as anybody would load it."""
    model = AutoModelForCausalLM.from_pretrained(where)
    assert not hasattr(model.config, "quantization_config")
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def of_the_run(run: Path) -> torch.Tensor:
    """Of the target model that the run is evaluated with."""
    target_model = load_for_decoding(resolve_model(str(run), None, None), "float32").target_model
    with torch.no_grad():
        return target_model.logits(target_model.run(TOKENS).final)


@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_plain_transformers_loads_what_the_run_decodes_with(
    make_run: Callable[..., Path], target_model_dir: Path, load_in_4bit: bool
) -> None:
    if load_in_4bit:
        pytest.importorskip("bitsandbytes")
    run = make_run(
        adapter=True, load_in_4bit=load_in_4bit, recipe="medusa2", chat_template="zephyr"
    )
    done = export_run(resolve_model(str(run), None, None), "merged")
    merged = logits(done.target)
    assert torch.allclose(merged, of_the_run(run), atol=1e-4)
    assert not torch.allclose(
        merged, logits(target_model_dir), atol=1e-2
    )  # the adapter did change it
    assert ("nf4, dequantised, adapter folded in" in done.facts[0]) == load_in_4bit
    tokenizer = AutoTokenizer.from_pretrained(done.target)
    assert tokenizer.chat_template == get_template("zephyr")  # with which it was trained


def test_heads_of_a_joint_run_name_the_merged_target_model_once_there_is_one(
    make_run: Callable[..., Path],
) -> None:
    run = make_run(adapter=True, recipe="medusa2")
    paths = resolve_model(str(run), None, None)
    done = export_run(replace(paths, target_model="owner/original"), "tgi")
    assert "--to merged" in done.warnings[0]
    assert "decode with the merged one" in (done.target / "README.md").read_text()
    (warning,) = export_run(paths, "vllm").warnings
    assert "--to merged" in warning
    merged = export_run(paths, "merged").target
    done = export_run(paths, "vllm")
    assert done.warnings == []
    assert json.loads((done.target / "config.json").read_text())["base_model_name_or_path"] == str(
        merged.resolve()
    )
    assert torch.allclose(of_the_run(done.target), of_the_run(run), atol=1e-4)
    later = (merged / "config.json").stat().st_mtime + 10
    # trained on since: the merged one is another
    os.utime(run / "adapter" / "adapter_config.json", (later, later))
    assert "--to merged" in export_run(paths, "vllm").warnings[0]


def test_a_target_model_that_was_trained_itself_is_copied(
    make_run: Callable[..., Path], target_model_dir: Path
) -> None:
    run = make_run(recipe="medusa2")
    with pytest.raises(CheckpointError, match="nothing to merge"):
        export_run(resolve_model(str(run), None, None), "merged")
    shutil.copytree(target_model_dir, run / "model")
    tokenizer = AutoTokenizer.from_pretrained(target_model_dir)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(run / "model")
    (run / "model" / "chat_template.jinja").unlink(missing_ok=True)
    done = export_run(
        replace(resolve_model(str(run), None, None), chat_template="zephyr"), "merged"
    )
    assert torch.equal(logits(done.target), logits(target_model_dir))
    assert "trained" in done.facts[0]
    # its target model would be its own result
    with pytest.raises(CheckpointError, match="holds other files"):
        export_run(
            replace(resolve_model(str(run), None, None), target_model=str(done.target)),
            "merged",
            done.target,
        )
    # the run's
    assert AutoTokenizer.from_pretrained(done.target).chat_template == TEMPLATES["zephyr"]
    again = export_run(resolve_model(str(run), None, None), "merged")  # over an earlier one
    assert again.target == done.target
    (done.target / "notes.txt").write_text("mine")
    (done.target / "model-00002-of-00002.safetensors").touch()  # of an earlier model
    export_run(resolve_model(str(run), None, None), "merged")
    assert (done.target / "notes.txt").read_text() == "mine"
    assert [path.name for path in done.target.glob("*.safetensors")] == ["model.safetensors"]


def test_a_failing_write_leaves_nothing_half_done(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(adapter=True, recipe="medusa2")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
    with pytest.raises(CheckpointError, match="could not write the merged target model"):
        export_run(resolve_model(str(run), None, None), "merged")
    assert not (run / "export").exists()


def test_a_merge_that_unties_lm_head_says_so(tmp_path: Path) -> None:
    """Older PEFT leaves `tie_word_embeddings: true`, with which lm_head would be the embeddings."""
    target_model = random_target_model("llama-bias-tied", dtype=torch.float32)
    adapter = Adapter.attach(
        target_model, LoraSpec(r=4, targets=("q_proj",), modules_to_save=("lm_head",))
    )
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.1)
    adapter.merge()
    tokens = TOKENS % target_model.vocab_size
    with torch.no_grad():
        expected = target_model.logits(target_model.run(tokens).final)
    target_model.model.config.tie_word_embeddings = True  # as PEFT 0.18 leaves it
    untie_config(target_model)
    target_model.model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.allclose(loaded(tokens).logits, expected, atol=1e-5)
    assert not json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
