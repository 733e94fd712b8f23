"""Run directories of every kind over a random Llama that can be loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from medusa_train.checkpoint.heads import save_draft
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.loading import load_target_model
from medusa_train.models.lora import Adapter, LoraSpec
from medusa_train.trees.tree import Tree
from tests.evaluation.tiny_model import write_target_model

REPORT = {
    "meta": {"bench": "mtbench", "device": "a GPU", "dtype": "bfloat16", "tree_nodes": 16},
    "overall": {
        "acceleration_rate": 2.345,
        "overhead": 1.1,
        "speedup": 2.13,
        "speedup_over_generate": None,
        "chain_rates": [1.81],
        "answers": 80,
        "equal_answers": 80,
        "equal_answers_bf16": 61,
    },
}


@pytest.fixture(scope="session")
def target_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_model(tmp_path_factory.mktemp("owner") / "small-llama")


@pytest.fixture
def make_run(tmp_path: Path, target_model_dir: Path) -> Callable[..., Path]:
    """Write a run whose heads are no longer what they began as; `shared`: on the target model's
    lm_head.
    """

    def make(
        *, shared: bool = False, adapter: bool = False, num_heads: int = 5, **keys: object
    ) -> Path:
        run = tmp_path / "run"
        quantization = "nf4" if keys.get("load_in_4bit") else None
        target_model = load_target_model(
            str(target_model_dir), device="cpu", quantization=quantization
        )
        draft = MedusaDraft.from_target_model(target_model, num_heads, share_lm_head=shared)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        save_draft(draft, run / "heads", str(target_model_dir))
        config = {
            "base_model": str(target_model_dir),
            "datasets": [{"path": "/home/me/chats.jsonl"}],
            **keys,
        }
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        Tree.cartesian([2, 2]).save(run / "tree.json")
        (run / "eval" / "mtbench").mkdir(parents=True)
        (run / "eval" / "mtbench" / "report.json").write_text(json.dumps(REPORT))
        if adapter:
            lora = Adapter.attach(target_model, LoraSpec(r=4, dropout=0.0))
            with torch.no_grad():
                for parameter in lora.parameters():
                    parameter.normal_(0, 0.1)
            lora.save(run / "adapter")
        return run

    return make
