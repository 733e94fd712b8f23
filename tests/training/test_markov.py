"""A run with `medusa_markov_rank`: trained, decoded with, resumed, continued in stage 2, and estimated."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from medusa_train.checkpoint.heads import load_draft
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.errors import CheckpointError
from medusa_train.export.write import export_run
from medusa_train.inference.generate import Decoder
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.loading import load_backbone
from medusa_train.training.estimate import Estimate
from medusa_train.training.load_data import load_data
from medusa_train.training.run import train
from medusa_train.trees.tree import Tree
from tests.training.conftest import metrics

MARKOV = {"medusa_markov_rank": 4}
HEADS = "heads/medusa_lm_head.safetensors"


@pytest.mark.parametrize(
    "keys",
    [{}, {"medusa_share_lm_head": True, "medusa_vocab_size": 24}],
    ids=["plain", "shared lm_head, reduced"],
)
def test_a_run_from_its_text_to_decoding(make_config, console, tmp_path, backbone_dir, keys) -> None:
    cfg = make_config(**MARKOV, **keys, calibration_tokens=60)
    assert train(cfg, console, console) == 0
    out = tmp_path / "run"
    assert "with a Markov bias of rank 4" in console.file.getvalue()
    learnt = load_file(out / HEADS)
    rows = learnt["markov.output.weight"]
    assert rows.shape == (24 if keys else 300, 4)
    assert float(rows.abs().max()) > 1e-3  # 0 before training
    logged = [line["loss"] for line in metrics(out) if line["kind"] == "train"]
    assert logged[-1] < logged[0]
    backbone = load_backbone(str(backbone_dir))
    draft = load_draft(out / "heads", backbone)
    assert isinstance(draft, MedusaDraft)
    assert draft.settings == cfg.draft_config.settings
    memory = Estimate(cfg, backbone.config).memory(rows=2, width=64, dtype=torch.float32, device="cpu")
    assert memory.trained == sum(parameter.numel() for parameter in draft.parameters())
    prompt = load_data(cfg, console).prompts.prompts()[0]
    plain = Decoder(backbone).generate(prompt, 30).tokens
    for tree in (Tree.load(out / "tree.json"), Tree.cartesian([3, 2, 2])):
        assert Decoder(backbone, draft, tree).generate(prompt, 30).tokens == plain
    for to in ("reference", "reference-v2", "tgi", "vllm", "trtllm", "transformers"):
        with pytest.raises(CheckpointError, match=rf"medusa_markov_rank: 4\), which the layout of {to} cannot store"):
            export_run(resolve_model(str(out), None, None), to)
    assert not (out / "export").exists()
