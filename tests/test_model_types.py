"""Tiny random models of the types that drafts are trained for, through train -> export -> decode."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from medusa_train.checkpoint.load_model import load_for_decoding
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import CheckpointError, TargetModelError
from medusa_train.export.write import export_run
from medusa_train.inference.generate import Decoder
from medusa_train.training.stages import train_stages
from medusa_train.trees.tree import Tree
from tests.model_types import DECODED, TRAINED, tiny_model
from tests.training.conftest import build_tokenizer, sentence

#: One of each kind; the others are slow only by their number.
FAST = {
    ("deepseek_v3", "medusa"),  # latent attention
    ("gpt_oss", "eagle3"),  # sinks
    ("gemma4_text", "eagle3"),  # heads that differ between the layers
    ("mistral3", "medusa"),  # text of a model that reads images
    ("qwen3_5", "eagle3"),  # no trees
}
PROMPT = [0, 2, 40, 50, 60, 70, 80, 90]
TOKENS = 24


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    draw = random.Random(1)
    lines = []
    for _ in range(12):
        turns = [{"from": who, "value": sentence(draw)} for who in ("human", "gpt")]
        lines.append(json.dumps({"conversations": turns}))
    path.write_text("\n".join(lines) + "\n")
    return path


def cases(types: dict[str, Any]) -> list[Any]:
    """Return every type with both drafts; slow but for a few."""
    listed = []
    for model_type in types:
        for draft in ("medusa", "eagle3"):
            if (model_type, draft) == ("deepseek_v4", "eagle3"):
                continue  # see below
            marks = [] if (model_type, draft) in FAST else [pytest.mark.slow]
            listed.append(pytest.param(model_type, draft, marks=marks))
    return listed


def train(model_type: str, draft: str, chats: Path, where: Path) -> tuple[Any, Path, str]:
    """Train a draft for a tiny model for three steps; return the model, the run and what it printed."""
    tokenizer = build_tokenizer()
    # eight spare rows, for tokens that a family's tokenizer class adds
    model = tiny_model(model_type, len(tokenizer) + 8)
    model.save_pretrained(where / "backbone")
    tokenizer.save_pretrained(where / "backbone")
    cfg = TrainConfig(
        base_model=str(where / "backbone"),
        datasets=[{"path": str(chats)}],
        output_dir=str(where / "run"),
        draft=draft,
        micro_batch_size=4,
        max_steps=3,
        learning_rate=1e-3,
        val_set_size=0.2,
        bf16=False,
        calibration_tokens=0,
        **({"medusa_num_heads": 3} if draft == "medusa" else {}),
    )
    printed = io.StringIO()
    console = Console(file=printed, width=1000)
    assert train_stages(cfg, console, console) == 0
    return model.eval(), where / "run", printed.getvalue()


@pytest.mark.parametrize(("model_type", "draft"), cases(DECODED))
def test_a_draft_is_trained_exported_and_decoded_with(
    model_type: str, draft: str, chats: Path, tmp_path: Path
) -> None:
    model, run, _ = train(model_type, draft, chats, tmp_path)
    export_run(resolve_model(str(run), None, None), "vllm")
    loaded = load_for_decoding(resolve_model(str(run), None, None), "float32")
    prompt = torch.tensor([PROMPT])
    plain = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
    )[0, len(PROMPT) :].tolist()
    assert len(set(plain)) > 3  # the text varies, so that the comparison can fail
    decoder = Decoder(loaded.target_model, loaded.draft, Tree.cartesian([3, 2, 2]))
    assert decoder.generate(PROMPT, TOKENS, []).tokens == plain


@pytest.mark.parametrize(("model_type", "draft"), cases(TRAINED))
def test_a_draft_is_trained_and_exported_without_trees(
    model_type: str, draft: str, chats: Path, tmp_path: Path
) -> None:
    _, run, printed = train(model_type, draft, chats, tmp_path)
    assert printed.count("its token trees cannot be verified here") == 1
    assert "next: medusa-export" in printed
    paths = resolve_model(str(run), None, None)
    export_run(paths, "vllm")
    with pytest.raises(TargetModelError, match="medusa-eval --serve"):
        load_for_decoding(paths, "float32")
    if draft == "medusa":
        with pytest.raises(CheckpointError, match="medusa-eval --serve"):
            export_run(paths, "transformers")


@pytest.mark.slow
def test_states_of_several_streams_cannot_be_drafted_from(chats: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TargetModelError, match="not supported by this draft: the input of its first"
    ):
        train("deepseek_v4", "eagle3", chats, tmp_path)
