"""Runs of every kind: trained, published, estimated, decoded with, stopped and resumed."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from medusa_train.checkpoint.heads import load_draft
from medusa_train.checkpoint.load_model import load_for_decoding
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.checkpoint.run_directory import check_only_run_files
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError, TargetModelError
from medusa_train.inference.generate import Decoder
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.loading import load_target_model
from medusa_train.training import setup
from medusa_train.training.estimate import Estimate
from medusa_train.training.inspect_run import inspect_run
from medusa_train.training.stages import train_stages
from medusa_train.trees.tree import Tree
from tests.training.conftest import LORA, figures, metrics, stop_after, train

RECIPES: dict[str, dict[str, Any]] = {
    "medusa": {},
    "bf16": {"bf16": True, "medusa_share_lm_head": True},
    "fp16": {"fp16": True},
    "reduced": {"medusa_vocab_size": 24, "medusa_soft_targets": 0.5},
    "shared": {"medusa_vocab_size": 24, "medusa_share_lm_head": True, "medusa_markov_rank": 4},
    "markov": {"medusa_markov_rank": 4},
    "kl": LORA,
    "rho": {**LORA, "medusa_self_distillation": False, "medusa_distillation_regularization": 0.5},
    "unfreeze": {"recipe": "medusa2", "medusa_num_unfreeze_layers": 1},
    "hydra": {
        "draft": "hydra",
        "hydra": {"num_heads": 2, "num_layers": 2, "dropout": 0.1, "vocab_size": 24},
    },
    "amphista": {"draft": "amphista", "amphista": {"num_heads": 2, "vocab_size": 24}},
    "kangaroo": {"draft": "kangaroo", "kangaroo": {"num_heads": 2, "exit_layer": 1}},
    "kangaroo-mlp": {
        "draft": "kangaroo",
        "kangaroo": {"exit_layer": 1, "mlp_size": 24, "attention": False, "share_lm_head": False},
    },
    "eagle3": {
        "draft": "eagle3",
        "eagle3": {"num_heads": 2, "train_steps": 2, "layers": [1, 1, 1]},
    },
    "eagle3-norms": {
        "draft": "eagle3",
        "eagle3": {
            "num_heads": 2,
            "train_steps": 2,
            "layers": [1, 1, 1],
            "fc_norm": True,
            "norm_output": True,
        },
    },
    "dflash": {
        "draft": "dflash",
        "dflash": {"max_draft_tokens": 2, "num_layers": 1, "layers": [1], "anchors": 4},
    },
    "dflash-markov": {
        "draft": "dflash",
        "dflash": {
            "max_draft_tokens": 2,
            "num_layers": 1,
            "layers": [1],
            "markov_rank": 4,
            "vocab_size": 24,
            "soft_targets": 0.5,
        },
    },
}
PACKED = {"sample_packing": True, "sequence_len": 64}
PROMPT = [0, 2, 10, 3]


def keys_of(recipe: str) -> dict[str, Any]:
    """Packed rows for the drafts with layers of their own, conversations for the others."""
    return {**RECIPES[recipe], **(PACKED if "draft" in RECIPES[recipe] else {})}


def test_every_draft_is_tested() -> None:
    assert {keys.get("draft", "medusa") for keys in RECIPES.values()} == set(DRAFTS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_learns_and_its_draft_decodes_to_the_target_models_text(
    recipe, make_config, console, tmp_path, target_model_dir
) -> None:
    cfg, run = make_config(**keys_of(recipe), max_steps=30, calibration_tokens=80), tmp_path / "run"
    assert train(cfg, console) == 0
    check_only_run_files(run, inner=True)  # overwriting it finds nothing of others
    records = metrics(run)
    learnt = [record["loss"] for record in records if record["kind"] == "train"]
    assert learnt[-1] < 0.97 * learnt[0]  # soft targets leave the entropy of a random target model
    heads = cfg.draft_config.num_heads
    assert len([record for record in records if record["kind"] == "eval"][-1]["head_top1"]) == heads
    reduced = "vocab_size" in str(RECIPES[recipe])
    assert all(
        (0 < r.get("outside_vocabulary", 0) < 1) == reduced for r in records if r["kind"] == "train"
    )
    text = console.file.getvalue()
    assert cfg.draft_config.describe() in " ".join(text.split())
    assert ("draft vocabulary: 24 of 300 tokens" in text) == reduced
    assert ("fp16: not supported on cpu; using float32" in text) == (recipe == "fp16")
    (saved,) = (run / "heads").glob("*.safetensors")
    dtypes = {one.dtype for one in load_file(saved).values()} - {torch.long}
    assert dtypes == {torch.bfloat16 if recipe == "bf16" else torch.float32}

    loaded = load_for_decoding(resolve_model(str(run), None, None), "float32")
    assert loaded.draft is not None
    # dropout would change what it guesses
    assert not loaded.draft.training or "draft" not in RECIPES[recipe]
    configured = {
        name: value for name, value in cfg.draft_config.settings.items() if value is not None
    }
    assert configured.items() <= {**loaded.draft.settings}.items()
    assert load_config(TrainConfig, run / "config.yaml").draft_config == cfg.draft_config
    plain = Decoder(loaded.target_model).generate(PROMPT, 30, ())
    for tree in (loaded.tree, Tree.cartesian([2] * heads)):
        assert (
            Decoder(loaded.target_model, loaded.draft, tree).generate(PROMPT, 30, ()).tokens
            == plain.tokens
        )
    if recipe not in ("kl", "rho", "unfreeze"):
        memory = Estimate(cfg, AutoConfig.from_pretrained(target_model_dir)).memory(
            rows=2, width=64, dtype=torch.float32, device="cpu"
        )
        assert memory.trained == sum(parameter.numel() for parameter in loaded.draft.parameters())


@pytest.mark.parametrize(
    "recipe", [recipe for recipe in RECIPES if recipe not in ("bf16", "fp16", "markov")]
)
def test_resumed_is_uninterrupted_to_the_bit(
    recipe, make_config, console, tmp_path, monkeypatch
) -> None:
    """Dropout included; the signal comes in the middle of a step."""
    keys = {**keys_of(recipe), "logging_steps": 2, "eval_steps": 4, "max_steps": 8}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(make_config(**keys, output_dir=str(whole)), console)
    stop_after(monkeypatch, 3)
    assert train(make_config(**keys, output_dir=str(parts)), console) == 130
    assert CheckpointStore(parts).steps() == [3]
    text = " ".join(console.file.getvalue().split())
    assert (
        f"stopped after step 3, saved. To resume: medusa-train {parts}/config.yaml"
        " resume_from_checkpoint=a" in text
    )
    torch.manual_seed(99)  # a new process would not have this one's random numbers
    assert (
        train(
            load_config(TrainConfig, parts / "config.yaml", ["resume_from_checkpoint=auto"]),
            console,
        )
        == 0
    )
    assert figures(parts) == figures(whole)
    files = sorted(path.relative_to(whole) for path in whole.glob("[ham]*/*.safetensors"))
    assert files
    assert all((whole / name).read_bytes() == (parts / name).read_bytes() for name in files)


@pytest.mark.parametrize("kind", ["hydra", "eagle3"])
def test_a_run_starts_from_heads_of_its_own_kind_alone(kind, make_config, console, tmp_path):
    first = str(tmp_path / "first")
    train(make_config(**RECIPES[kind], output_dir=first), console)
    again = make_config(**RECIPES[kind], lora_model_dir=first, max_steps=1, learning_rate=1e-9)
    assert train(again, console) == 0
    one, other = (
        load_draft(tmp_path / run / "heads", load_target_model(again.base_model))
        for run in ("first", "run")
    )
    assert torch.allclose(one.lm_head(1).weight, other.lm_head(1).weight, atol=1e-6)
    with pytest.raises(ConfigError, match=f"holds a {kind} draft; set draft: {kind}"):
        train(make_config(lora_model_dir=first, overwrite_output_dir=True), console)
    wider = {"draft": kind, kind: {**RECIPES[kind][kind], "num_heads": 3}}
    with pytest.raises(
        ConfigError, match=rf"have {kind}\.num_heads: 2, .* configuration {kind}\.num_heads: 3"
    ):
        train(make_config(**wider, lora_model_dir=first, overwrite_output_dir=True), console)


@pytest.mark.parametrize(
    ("kind", "keys"), [("kangaroo", {"exit_layer": 9}), ("eagle3", {"layers": [1, 1, 9]})]
)
def test_a_layer_behind_the_last_is_refused_before_anything_is_loaded(
    make_config, console, monkeypatch, kind, keys
):
    monkeypatch.setattr(setup, "load_target_model", None)
    cfg = make_config(**{"draft": kind, kind: keys})
    for command in (train_stages, inspect_run):
        with pytest.raises(TargetModelError, match=rf"{kind}\.{next(iter(keys))} 9: .* use 1 to"):
            command(cfg, console, console)
