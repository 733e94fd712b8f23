"""The tables of docs/large_models.md are what the code estimates."""

from pathlib import Path

import estimates
import pytest
import torch
from transformers import AutoConfig

from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.hf_config import head_dim
from medusa_train.models.loading import load_backbone
from medusa_train.trees.kv_slots import Slots
from tests.evaluation.tiny_model import write_backbone


def test_the_page_has_the_estimates_of_the_code() -> None:
    text = estimates.PAGE.read_text(encoding="utf-8")
    assert estimates.page(text) == text
    for make in estimates.TABLES.values():
        assert make() in text


def test_every_configuration_fits_the_gpu_of_its_row() -> None:
    for line in estimates.training_table().splitlines()[2:]:
        gpu, memory = (cell.strip() for cell in line.split("|")[3:5])
        # a tenth is left for what is not estimated: the CUDA context, fragmentation, the kernels'
        # workspace
        assert int(memory.split()[0]) * 1.073741824 < 0.9 * int(gpu.split()[-2])


@pytest.mark.parametrize("draft", ["medusa", "eagle3"])
def test_decoding_takes_what_model_and_draft_hold(tmp_path: Path, draft: str) -> None:
    """The parts of the table are the bytes of a loaded model, of its draft and of the slots."""
    directory = write_backbone(tmp_path / "backbone")
    keys = [f"base_model={directory}", f"draft={draft}", "datasets=[{path: tiny}]"]
    cfg = load_config(TrainConfig, None, keys)
    backbone = load_backbone(str(directory), dtype="bfloat16")
    shape = AutoConfig.from_pretrained(directory)
    memory = estimates.decoding_memory(cfg, shape, positions=100)

    settings = cfg.draft_config.settings
    own = DRAFTS[draft].from_backbone(backbone, dtype=torch.bfloat16, **settings)
    assert memory.weights == sum(p.nbytes for p in backbone.model.parameters())
    assert memory.draft == sum(p.nbytes for p in own.parameters())

    layers = backbone.num_layers + own.num_caches
    slots = Slots(layers, capacity=100, block=99)
    first = torch.zeros(1, shape.num_key_value_heads, 1, head_dim(shape), dtype=torch.bfloat16)
    assert memory.cache == slots.allocate(first, 99).nbytes


def test_the_least_step_is_bound_by_what_it_reads() -> None:
    rows, seconds = estimates.least_step(estimates.LLAMA_8B, "H100, 80 GB")
    weights = 2 * 7.5e9  # all but the embeddings
    cache = rows * 1024 * 2 * 32 * 1024 * 2
    assert rows == 64
    assert seconds == pytest.approx((weights + cache) / 3.35e12, rel=0.01)
