"""What needs the token trees of a target model is refused, before weights load, where it has none."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3_5TextConfig

from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError
from medusa_train.training.preflight import check_run


@pytest.mark.parametrize(
    ("keys", "advice"),
    [
        ({"sample_packing": True}, "Set sample_packing: false"),
        ({"recipe": "medusa2", "adapter": "lora"}, "Set recipe: medusa1"),
        ({"draft": "hydra"}, "Set draft: medusa or eagle3"),
        ({"draft": "kangaroo"}, "Set draft: medusa or eagle3"),
    ],
    ids=["packing", "medusa2", "hydra", "kangaroo"],
)
def test_what_needs_trees_or_layers_is_refused(
    tmp_path: Path, keys: dict[str, Any], advice: str
) -> None:
    Qwen3_5TextConfig(num_hidden_layers=8, layer_types=None).save_pretrained(tmp_path)
    cfg = TrainConfig(
        base_model=str(tmp_path), datasets=[{"path": "x"}], output_dir="runs/x", **keys
    )
    with pytest.raises(ConfigError) as caught:
        check_run(cfg, 1)
    name, value = next(iter(keys.items()))
    value = str(value).lower() if isinstance(value, bool) else value
    assert str(caught.value).startswith(f"{name}: {value}: base_model {tmp_path}: its token trees")
    assert str(caught.value).endswith(advice)
