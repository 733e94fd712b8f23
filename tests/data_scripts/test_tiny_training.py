"""Tests of data/tiny: the shapes of the shipped model, and a whole build in miniature."""

from dataclasses import replace
from pathlib import Path

import build
import chats
import corpus
import torch
from safetensors import safe_open
from training import Recipe, build_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_train.config.paths import PROJECT_ROOT

SMALL = Recipe(
    steps=6,
    hidden=32,
    head_dim=16,
    layers=2,
    intermediate=48,
    vocabulary=64,
    micro_batch=64,
    warmup=2,
    brief_steps=2,
)


def test_recipe_has_the_shipped_model_s_shapes() -> None:
    with safe_open(PROJECT_ROOT / "data" / "tiny" / "model.safetensors", "pt") as file:
        shipped = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {
        name: tuple(value.shape) for name, value in build_model(Recipe()).state_dict().items()
    } == shipped


def test_build_in_miniature(module: str, tmp_path: Path) -> None:
    problems = [
        corpus.Problem(f"Ada has {n} boxes. How many are that?", f"The answer is {n}.")
        for n in range(80)
    ]
    recipe = replace(
        SMALL,
        steps=4,
        vocabulary=400,
        micro_batch=512,
        unlikelihood_rounds=1,
        unlikelihood_requests=4,
    )
    build.build([*corpus.functions_in(module), *problems], recipe, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert not model.config.tie_word_embeddings
    assert (
        model.generation_config.eos_token_id
        == AutoTokenizer.from_pretrained(tmp_path).eos_token_id
        == chats.EOS_ID
    )
