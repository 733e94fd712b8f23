"""Runs of other drafts than Medusa: trained, stopped and resumed, published, decoded and taken up again."""

import signal

import pytest
import torch
from safetensors.torch import load_file

from medusa_train.checkpoint.heads import load_draft, read_heads
from medusa_train.checkpoint.load_model import load_with_draft
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.drafts import DRAFT_CONFIGS
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import BackboneError, CheckpointError, ConfigError
from medusa_train.inference.generate import Decoder
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.loading import load_backbone
from medusa_train.training import setup
from medusa_train.training.estimate import Estimate
from medusa_train.training.inspect import inspect_run
from medusa_train.training.run import train
from tests.training.conftest import metrics
from tests.training.test_run import stop_after

SECTIONS = {
    "hydra": {"num_heads": 2, "num_layers": 2, "dropout": 0.1},
    "amphista": {"num_heads": 2},
    "kangaroo": {"num_heads": 2, "exit_layer": 1},
    "eagle3": {"num_heads": 2, "train_steps": 2},
}
KINDS = list(SECTIONS)


def test_every_draft_is_tested() -> None:
    assert {"medusa", *SECTIONS} == set(DRAFTS)  # test_run.py trains Medusa heads


@pytest.fixture
def make_draft_config(make_config):
    def make(kind, **keys):
        return make_config(**{"draft": kind, kind: SECTIONS[kind], "sample_packing": True, "sequence_len": 64, **keys})

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_and_its_draft_decodes_to_the_backbones_text(kind, make_draft_config, console, tmp_path):
    out = tmp_path / "run"
    assert train(make_draft_config(kind, max_steps=30, calibration_tokens=120), console, console) == 0
    records = metrics(out)
    learnt = [record["loss"] for record in records if record["kind"] == "train"]
    assert learnt[-1] < 0.95 * learnt[0]  # soft targets leave the entropy of a random backbone
    held_out = [record for record in records if record["kind"] == "eval"][-1]
    assert len(held_out["head_top1"]) == 2
    assert DRAFT_CONFIGS[kind].title in console.file.getvalue()
    assert load_config(TrainConfig, out / "config.yaml").draft_config.num_heads == 2
    subject = load_with_draft(resolve_model(str(out), None, None), "float32")
    assert subject.draft is not None
    assert not subject.draft.training  # dropout would change what it guesses
    plain = Decoder(subject.backbone).generate([0, 2, 10, 3], 30, ())
    drafted = Decoder(subject.backbone, subject.draft, subject.tree).generate([0, 2, 10, 3], 30, ())
    assert drafted.tokens == plain.tokens
    with pytest.raises(CheckpointError, match="another kind than Medusa"):
        read_heads(out / "heads")


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_uninterrupted_to_the_bit(kind, make_draft_config, console, tmp_path, monkeypatch):
    keys = {"logging_steps": 2, "eval_steps": 4, "max_steps": 8, "gradient_accumulation_steps": 1}
    train(make_draft_config(kind, output_dir=str(tmp_path / "whole"), **keys), console, console)
    stop_after(monkeypatch, 3, signal.SIGINT)
    broken = make_draft_config(kind, output_dir=str(tmp_path / "broken"), **keys)
    assert train(broken, console, console) == 130
    torch.manual_seed(99)  # a new process would not have this one's random numbers
    resumed = load_config(TrainConfig, tmp_path / "broken" / "config.yaml", ["resume_from_checkpoint=auto"])
    assert train(resumed, console, console) == 0
    one, other = (load_file(tmp_path / name / "heads" / "draft.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_starts_from_heads_of_its_own_kind_alone(make_draft_config, make_config, console, tmp_path):
    first = str(tmp_path / "first")
    train(make_draft_config("hydra", output_dir=first), console, console)
    again = make_draft_config("hydra", lora_model_dir=first, max_steps=1, learning_rate=1e-9)
    assert train(again, console, console) == 0
    backbone = load_backbone(again.base_model)
    one, other = (load_draft(home, backbone) for home in (tmp_path / "first" / "heads", tmp_path / "run" / "heads"))
    assert torch.allclose(one.lm_head(2).weight, other.lm_head(2).weight, atol=1e-6)
    with pytest.raises(ConfigError, match="holds a hydra draft; set draft: hydra"):
        train(make_config(lora_model_dir=first, overwrite_output_dir=True), console, console)
    wider = {"num_heads": 3, "num_layers": 2, "dropout": 0.1}
    with pytest.raises(ConfigError, match=r"with hydra\.num_heads: 2, .* sets hydra\.num_heads: 3"):
        train(
            make_draft_config("hydra", hydra=wider, lora_model_dir=first, overwrite_output_dir=True), console, console
        )


def test_an_exit_behind_the_last_layer_is_refused_before_anything_is_loaded(make_draft_config, console, monkeypatch):
    monkeypatch.setattr(setup, "load_backbone", None)
    cfg = make_draft_config("kangaroo", kangaroo={"exit_layer": 9})
    for command in (train, inspect_run):
        with pytest.raises(BackboneError, match=r"exit_layer 9 is out of range: .* use 1 to"):
            command(cfg, console, console)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_estimated_from_shapes(kind, make_draft_config):
    cfg = make_draft_config(kind)
    backbone = load_backbone(cfg.base_model)
    draft = DRAFTS[kind].from_backbone(backbone, **cfg.draft_config.settings)
    learnt = sum(parameter.numel() for parameter in draft.parameters())
    found = Estimate(cfg, backbone.model.config).memory(rows=2, width=64, dtype=torch.float32, device="cpu")
    assert found.trained == learnt
