"""What vLLM 0.32's loader does with Medusa heads, without vLLM; tests/serving compares it with the
real one.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def loader_problems(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> list[str]:
    """List what the loader would not load as intended.

    The rules are those of `MedusaConfig.from_pretrained`, `SpeculativeConfig` and
    `Medusa.load_weights`: keys that contain "num" and "heads" or "layers" are renamed, unknown
    tensors are dropped and missing matrices stay uninitialized, without an error.
    """
    loaded = dict(config)
    for key in config:
        for word, name in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
            if "num" in key and word in key:
                loaded[name] = loaded.pop(key)
    problems = [
        f"{key} becomes {loaded.get(key)!r}" for key in config if loaded.get(key) != config[key]
    ]
    if (config["model_type"], config["architectures"]) != ("medusa", ["MedusaModel"]):
        problems.append("another model")
    if loaded["truncated_vocab_size"] < loaded["vocab_size"]:
        problems.append("truncated_vocab_size is less than vocab_size: vLLM 0.32 cannot load that")
    expected = _expected_shapes(loaded)
    problems += [
        f"{name}: dropped without a warning" for name in sorted(set(tensors) - set(expected))
    ]
    problems += [
        f"{name}: missing, it would stay random" for name in sorted(set(expected) - set(tensors))
    ]
    return problems + [
        f"{name}: {list(tensors[name].shape)}, expected {list(expected[name])}"
        for name in sorted(set(tensors) & set(expected))
        if tuple(tensors[name].shape) != expected[name]
    ]


def _expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, rows = config["hidden_size"], config["truncated_vocab_size"]
    expected: dict[str, tuple[int, ...]] = {}
    for i in range(config["num_heads"]):
        for j in range(config["num_hidden_layers"]):
            expected[f"blocks.{i}.layers.{j}.weight"] = (width, width)
            if config.get("medusa_fc_bias", False):
                expected[f"blocks.{i}.layers.{j}.bias"] = (width,)
        if i == 0 or not config.get("original_lm_head", False):
            expected[f"lm_heads.{i}.weight"] = (rows, width)
    if "medusa_vocab_size" in config:
        expected["token_map"] = (config["medusa_vocab_size"],)  # ignored by vLLM, read by us
    return expected
