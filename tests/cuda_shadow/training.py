"""Training on the pretend device: a step, a validation and a checkpoint of every recipe and draft,
and its waits.

Run by `test_cuda_shadow.py`. Packed rows take one sdpa call per document in place of the GPU's
kernels.
"""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from medusa_train.config.schema import TrainConfig
from medusa_train.progress import RunProgress
from medusa_train.training.load_data import load_data
from medusa_train.training.setup import build_trainer
from tests.cuda_shadow.device import counted
from tests.gpu import steps
from tests.gpu.steps import write_chats, write_model

LORA = {
    "recipe": "medusa2",
    "adapter": "lora",
    "lora_target_linear": True,
    "lora_r": 4,
    "lora_dropout": 0.0,
}
PACKED = {"sample_packing": True, "sequence_len": 512}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"bf16": False, "fp16": True},
    "packed": PACKED,
    "reduced vocabulary": {"medusa_vocab_size": 128},
    "lora": LORA,
    "lora-distilled": {**LORA, "medusa_self_distillation": True, "gradient_checkpointing": True},
    "last-layer": {"recipe": "medusa2", "medusa_num_unfreeze_layers": 1},
    "hydra": {"draft": "hydra"},
    "hydra-packed": {"draft": "hydra", **PACKED},
    "amphista": {"draft": "amphista"},
    "kangaroo": {"draft": "kangaroo"},
}
#: Transfers and waits of a step of one micro-batch: two for each term of the loss, whose rows with
# a target are found and checked, one more with a teacher, about seven beside them, and one per
# layer for documents without a kernel.
WAITS = {
    "bf16": 17,
    "fp16": 17,
    "packed": 21,
    "reduced vocabulary": 17,
    "lora": 19,
    "lora-distilled": 22,
}
WAITS |= {"last-layer": 19, "hydra": 22, "hydra-packed": 27, "amphista": 25, "kangaroo": 13}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps.SHAPES["cuda"] = (64, 96, 2, 4, 2, 512)
    home = tmp_path_factory.mktemp("pretend")
    write_model(home / "model", torch.device("cpu"))
    write_chats(home / "chats.jsonl", 60)
    return home


@pytest.mark.parametrize("case", CASES)
def test_a_step_a_validation_and_a_checkpoint(
    case: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        "base_model": str(home / "model"),
        "datasets": [{"path": str(home / "chats.jsonl"), "type": "sharegpt"}],
    }
    keys |= {
        "output_dir": str(tmp_path / "run"),
        "sequence_len": 1024,
        "micro_batch_size": 2,
        "max_steps": 2,
    }
    keys |= {
        "warmup_steps": 0,
        "logging_steps": 1,
        "val_set_size": 0.25,
        "calibration_tokens": 0,
        "bf16": True,
    }
    keys |= {"optimizer": "adamw_torch", **CASES[case]}
    console = Console(file=io.StringIO(), width=200)
    cfg = TrainConfig.model_validate(keys)
    trainer = build_trainer(cfg, load_data(cfg, console), RunProgress(console))
    assert trainer.recipe.target_model.device.type == "cuda"
    trainer.recipe.train()
    trainer.draft.train()
    batches = iter(trainer.loader)
    trainer.train_step(batches)  # allocates the optimizer's states
    asked = []
    with counted() as transfers, monkeypatch.context() as patch:
        # the driver takes milliseconds to say what is free
        patch.setattr(torch.cuda, "mem_get_info", lambda *device: asked.append(device))
        trainer.train_step(batches)
    assert not asked
    assert sum(transfers.values()) - transfers["pinned upload"] <= WAITS[case], transfers.places
    assert trainer.validation_batches is not None
    assert trainer.evaluate(trainer.validation_batches()).loss > 0
    trainer._save_checkpoint()
    assert list((tmp_path / "run").glob("checkpoints/*"))
