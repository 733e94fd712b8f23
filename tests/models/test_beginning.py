"""A draft's layer begins as the backbone's: to the bit where it is as wide, else with its strongest units."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.beginning import begin_as
from medusa_train.models.drafts.kangaroo import KangarooDraft
from medusa_train.models.drafts.layers import DraftLayer
from medusa_train.models.features import Rows
from medusa_train.models.quantization import keep_trainable_kernels, quantized_loading
from tests.families import FAMILIES, NoTokenizer, random_backbone


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_layer_is_the_backbone_s(family: str) -> None:
    backbone = random_backbone(family)
    layer = DraftLayer(backbone)
    begin_as(layer.body.layers[0], backbone.layer(1))
    theirs = dict(backbone.layer(1).named_parameters())
    for name, parameter in layer.body.layers[0].named_parameters():
        if "mlp" not in name or family != "mixtral":
            assert torch.equal(parameter, theirs[name]), name
        assert parameter.data_ptr() != theirs[name].data_ptr()


def test_an_exit_before_the_last_layer_begins_as_the_whole_model() -> None:
    """Its adapter is then the layer that it leaves out."""
    backbone = random_backbone("llama")
    exit_layer = backbone.num_layers - 1
    width = backbone.config.intermediate_size
    draft = KangarooDraft.from_backbone(backbone, exit_layer=exit_layer, mlp_size=width)
    tokens = torch.randint(backbone.vocab_size, (1, 9))
    feats = backbone.run(tokens, need=draft.needs)
    torch.testing.assert_close(draft.states(feats, Rows.of(tokens)), feats.hidden, rtol=1e-10, atol=1e-10)


class Fused(nn.Module):
    """An MLP with one matrix for gate and up, as Phi-3 has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(4, 2 * width, bias=True)
        self.down_proj = nn.Linear(width, 4, bias=False)


class Apart(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(4, width, bias=True), nn.Linear(4, width, bias=True)
        self.down_proj = nn.Linear(width, 4, bias=False)


@pytest.mark.parametrize("kind", [Fused, Apart])
def test_a_narrower_mlp_keeps_the_strongest_units(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    wide, narrow = kind(6), kind(2)
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            view = weight.T if name == "down_proj.weight" else weight.unflatten(0, (-1, 6)).transpose(0, 1)
            view[[0, 2, 3, 5]] *= 0.01
    begin_as(narrow, wide)
    theirs = dict(wide.named_parameters())
    for name, parameter in narrow.named_parameters():
        weight = theirs[name]
        expected = (
            weight[:, [1, 4]] if name == "down_proj.weight" else weight.unflatten(0, (-1, 6))[:, [1, 4]].flatten(0, 1)
        )
        assert torch.equal(parameter, expected), name


def test_a_wider_mlp_stays_as_it_was() -> None:
    torch.manual_seed(0)
    wide = Apart(6)
    before = {name: parameter.clone() for name, parameter in wide.named_parameters()}
    begin_as(wide, Apart(2))
    assert all(torch.equal(parameter, before[name]) for name, parameter in wide.named_parameters())


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    random_backbone("llama", dtype=torch.float32).model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, **quantized_loading("nf4", torch.float32, "cpu")
    )
    keep_trainable_kernels(model)
    backbone = Backbone(model, NoTokenizer(), "four bits")
    draft = KangarooDraft.from_backbone(backbone, exit_layer=1, dtype=torch.float32)
    theirs = backbone.layer(1).self_attn.q_proj.weight
    expected = functional.dequantize_4bit(theirs.data, theirs.quant_state).float()
    assert torch.equal(draft.adapter.body.layers[0].self_attn.q_proj.weight, expected)
