"""Each supported family, small and random, through train -> export -> import -> decode."""

import io
import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM

from medusa_train.checkpoint.heads import read_heads
from medusa_train.checkpoint.load_model import load_for_decoding
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.schema import TrainConfig
from medusa_train.export.write import export_run
from medusa_train.inference.generate import Decoder
from medusa_train.training.stages import train_stages
from medusa_train.trees.tree import Tree
from tests.families import random_model, random_target_model
from tests.training.conftest import build_tokenizer, sentence

#: The supported families; Llama in versions 2 and 3.
TEN = [
    "llama",
    "llama3",
    "mistral-window",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "smollm3",
    "granite",
]
#: Families that differ little from another one in the list.
SIMILAR = {"llama3", "qwen2", "olmo2"}
TOKENS = 24


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    draw = random.Random(1)
    lines = [
        json.dumps(
            {"conversations": [{"from": who, "value": sentence(draw)} for who in ("human", "gpt")]}
        )
        for _ in range(12)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.slow) if f in SIMILAR else f for f in TEN]
)
def test_train_export_import_decode(
    family: str, tokenizer: transformers.PreTrainedTokenizerFast, chats: Path, tmp_path: Path
) -> None:
    target_model_dir, run = tmp_path / "backbone", tmp_path / "run"
    # eight spare rows, for tokens that a family's tokenizer class adds
    random_model(family, vocab_size=len(tokenizer) + 8, bos_token_id=0).save_pretrained(
        target_model_dir
    )
    tokenizer.save_pretrained(target_model_dir)
    cfg = TrainConfig(
        base_model=str(target_model_dir),
        datasets=[{"path": str(chats)}],
        output_dir=str(run),
        medusa_num_heads=3,
        micro_batch_size=4,
        max_steps=2,
        learning_rate=1e-3,
        val_set_size=0.2,
        bf16=False,
        calibration_tokens=0,
    )
    console = Console(file=io.StringIO())
    assert train_stages(cfg, console, console) == 0
    exported = export_run(resolve_model(str(run), None, None), "vllm").target
    ours, again = read_heads(run / "heads"), read_heads(exported)
    assert all(torch.equal(ours.state[name], again.state[name]) for name in ours.state)

    loaded = load_for_decoding(resolve_model(str(exported), None, None), "float64")
    assert loaded.draft is not None
    assert loaded.draft.softcap == loaded.target_model.softcap
    assert loaded.draft.scale == loaded.target_model.scale
    prompt = [0, 2, 40, 50, 60, 70, 80, 90]
    stock = AutoModelForCausalLM.from_pretrained(
        target_model_dir, dtype=torch.float64, attn_implementation=loaded.target_model.attention
    )
    plain = stock.generate(
        torch.tensor([prompt]),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=1,
    )[0, len(prompt) :].tolist()
    assert len(set(plain)) > 4  # the text varies, so that the comparison can fail
    for tree in (Tree.cartesian([3, 2, 2]), Tree.empty()):
        assert (
            Decoder(loaded.target_model, loaded.draft, tree).generate(prompt, TOKENS, []).tokens
            == plain
        )


def test_the_random_families_have_their_special_features() -> None:
    """Otherwise the tests above would not cover soft caps, scales, windows, tied matrices and odd
    head sizes.
    """
    target_models = {family: random_target_model(family) for family in TEN}
    assert target_models["gemma2"].softcap == 30.0
    assert target_models["granite"].scale == 1 / 8
    assert target_models["granite"].config.embedding_multiplier == 4.0
    assert {"sliding_attention", "full_attention"} == set(target_models["gemma3"].layer_types)
    assert target_models["mistral-window"].window == 7
    assert target_models["qwen3"].config.head_dim * 4 != target_models["qwen3"].hidden_size
    models = {name: target_model.model for name, target_model in target_models.items()}
    tied = {
        name: m.get_output_embeddings().weight is m.get_input_embeddings().weight
        for name, m in models.items()
    }
    assert {tied["llama3"], tied["smollm3"]} == {True}
    assert {tied["llama"], tied["granite"]} == {False}
    assert 0 in target_models["smollm3"].config.no_rope_layers
