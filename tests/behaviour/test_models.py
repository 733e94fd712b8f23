"""Which models are taken, which are refused and why, and mixtures of experts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.behaviour.seams import decode, new_draft
from tests.behaviour.test_decoding import SETTINGS, SHORT_PROMPTS
from tests.behaviour.world import (
    NARROW,
    SHAPE,
    evaluate,
    greedy,
    metrics,
    train,
    training_keys,
    write_lines,
)

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300}
REFUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "encoder and decoder": ("T5Config", {"d_model": 32}, ["encoder-decoder"]),
    "recurrent": ("MambaConfig", SMALL, ["max_position_embeddings"]),
    "ALiBi": ("BloomConfig", {"hidden_size": 32, "n_layer": 2}, []),
    "no language model": ("CLIPConfig", {}, ["no language model of this type"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_are_refused_before_weights_are_read(
    name: str, model: Path, chats: Path, tmp_path: Path
) -> None:
    kind, settings, words = REFUSED[name]
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    (directory / "model.safetensors").unlink()
    getattr(transformers, kind)(**settings).save_pretrained(directory)
    keys = training_keys(directory, chats, tmp_path / "run")
    train(**keys).fails(1, "not supported", "Supported:", *words)
    bench = write_lines(tmp_path / "one.jsonl", [{"question_id": 1, "turns": ["one"]}])
    shown = evaluate("--bench", bench, "--base-model", directory, output_dir=tmp_path / "out")
    shown.fails(1, "not supported", *words)
    assert not (tmp_path / "run").exists()


def test_a_model_without_token_trees_is_named_before_weights_are_read(
    model: Path, chats: Path, tmp_path: Path
) -> None:
    """It can be trained for; an evaluation, which would decode, is an error."""
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    (directory / "model.safetensors").unlink()
    transformers.JambaConfig(**SMALL).save_pretrained(directory)
    shown = train(**training_keys(directory, chats, tmp_path / "run"))
    shown.fails(1, "token trees cannot be verified here (recurrent state", "model.safetensors")
    bench = write_lines(tmp_path / "one.jsonl", [{"question_id": 1, "turns": ["one"]}])
    shown = evaluate("--bench", bench, "--base-model", directory, output_dir=tmp_path / "out")
    shown.fails(1, "recurrent state")


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


def test_damaged_files_of_a_model_are_named(copied: Path, chats: Path, tmp_path: Path) -> None:
    keys = training_keys(copied, chats, tmp_path / "run")
    path = copied / "model.safetensors"
    whole = path.read_bytes()
    state = {name: tensor.clone() for name, tensor in load_file(path).items()}

    path.unlink()  # it may be mapped
    path.write_bytes(whole[: len(whole) // 2])
    train(**keys).fails(1, "model.safetensors", "damaged")
    path.unlink()
    train(**keys).fails(1, "base_model")
    (copied / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(state, "part-1.safetensors")})
    )
    train(**keys).fails(1, "model.safetensors.index.json")
    (copied / "model.safetensors.index.json").unlink()

    name = "model.layers.1.mlp.up_proj.weight"
    spoilt = {**state, name: state[name].clone()}
    spoilt[name][3, 4] = float("nan")
    save_file(spoilt, path, metadata={"format": "pt"})
    train(**keys).fails(1, name)
    path.unlink()
    path.write_bytes(whole)

    config = (copied / "config.json").read_text()
    (copied / "config.json").write_text(config[:-20])
    train(**keys).fails(1, "config.json")
    (copied / "config.json").unlink()
    train(**keys).fails(1, "no config.json")
    (copied / "config.json").write_text(config)
    path.rename(copied / "adapter_model.safetensors")
    (copied / "adapter_config.json").write_text("{}")
    train(**keys).fails(1, "an adapter without its model", "merge it")
    (copied / "adapter_model.safetensors").rename(path)
    (copied / "adapter_config.json").unlink()
    (copied / "tokenizer.json").write_text("{")
    train(**keys).fails(1, "base_model")
    train(**keys | {"base_model": tmp_path / "mode"}).fails(1, "no such directory")


def test_a_config_that_changes_what_is_computed_is_noticed(
    copied: Path, chats: Path, tmp_path: Path
) -> None:
    """Other weights than those of its shape."""
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    train(**training_keys(copied, chats, tmp_path / "run")).fails(1, "base_model")


EXPERTS = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    ),
}


@pytest.mark.parametrize("family", EXPERTS)
def test_mixtures_of_experts_decode_their_own_answers(family: str) -> None:
    name, settings = EXPERTS[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**SHAPE, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model = model.eval()  # its products of experts know no float64
    expected = [greedy(model, prompt, 16, ()) for prompt in SHORT_PROMPTS]
    for draft in (None, new_draft(*SETTINGS["medusa"])):
        for way in ({}, {"rows": 3, "joins": 1}):
            outs = decode(
                model, SHORT_PROMPTS, draft, tree=NARROW if draft else (), max_new_tokens=16, **way
            )
            assert [out.tokens for out in outs] == expected


def test_a_mixture_of_experts_trains(copied: Path, chats: Path, tmp_path: Path) -> None:
    name, settings = EXPERTS["mixtral"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**SHAPE, **settings))
    model.save_pretrained(copied)
    keys = training_keys(copied, chats, tmp_path / "run", max_steps=6, learning_rate=5e-3)
    train(**keys).ok()
    losses = [record["loss"] for record in metrics(tmp_path / "run")]
    assert losses[-1] < losses[0]
