"""The tables of docs/explanation/estimates.md, which are written by hand, are what the code estimates."""

import re

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from medusa_train.config.load import load_config, stage_one_config
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import TrainConfig
from medusa_train.training.estimate import GPUS, RATES, Estimate

PAGE = (PROJECT_ROOT / "docs" / "explanation" / "estimates.md").read_text(encoding="utf-8")
# of one epoch: 60,000 conversations of 1,000 tokens, of which 70 % are answers
TOKENS, SUPERVISED, CONVERSATION = 60_000_000, 42_000_000, 1000
GIB = 2**30
#: By the beginning of a configuration's name, the sizes that the models' authors published.
SHAPES: dict[str, PretrainedConfig] = {
    "llama31_8b": LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131_072,
    ),
    "vicuna7b": LlamaConfig(
        vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=4096,
    ),
    "qwen3_8b": Qwen3Config(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
    ),
    "qwen3_06b": Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
ROWS = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (\d+) GiB \| .* \| ([\d.]+) \|$", PAGE, re.M)


@pytest.mark.parametrize(("name", "keys", "gpu", "memory", "hours"), ROWS)
def test_training_takes_what_the_page_says_and_fits_its_gpu(
    name: str, keys: str, gpu: str, memory: str, hours: str
) -> None:
    overrides = re.findall(r"`(.+?)`", keys)
    run = load_config(TrainConfig, PROJECT_ROOT / "configs" / f"{name}.yaml", overrides)
    (shape,) = (one for prefix, one in SHAPES.items() if name.startswith(prefix))
    total, spent = 0.0, 0.0
    for cfg in filter(None, (stage_one_config(run), run)):
        estimate, width = Estimate(cfg, shape), int(cfg.sequence_len)
        rows = cfg.micro_batch_size
        step = estimate.memory(rows=rows, width=width, dtype=torch.bfloat16, device="cuda")
        total = max(total, step.total)
        operations = estimate.operations(
            tokens=TOKENS,
            supervised=SUPERVISED,
            width=width if cfg.sample_packing else CONVERSATION,
            epochs=cfg.num_epochs,
        )
        spent += operations / (GPUS[gpu] * RATES[cfg.recipe].share) / 3600
    assert f"{total / GIB:.0f}" == memory
    assert f"{spent:.1f}" == hours
    # a tenth is left for what is not estimated: the CUDA context, fragmentation, workspaces
    assert total < 0.9 * int(gpu.split()[-2]) * 1e9


def test_the_page_has_a_row_for_every_gpu() -> None:
    assert len(ROWS) == 22
    assert {gpu for _, _, gpu, _, _ in ROWS} == set(GPUS)


def test_pages_give_the_hours_and_memory_of_the_estimates() -> None:
    """README and the tutorial round them, and add up the hours of data and training."""
    readme = (PROJECT_ROOT / "README.md").read_text(encoding="utf-8")
    tutorial = PROJECT_ROOT / "docs" / "tutorials" / "llama31-8b.md"
    sums = {}
    for gpu in ("RTX 4090", "A100", "H100"):
        low, high, training, memory = re.search(
            rf"^\| {gpu}, .*? \| (\d+) to (\d+) h \|.*\| ([\d.]+) h, (\d+) GiB.* \| \d+ GiB \|$",
            PAGE,
            re.M,
        ).groups()  # type: ignore[union-attr]
        hours = float(training)
        sums[gpu] = f"{int(low) + hours:.0f} to {int(high) + hours:.0f}"
        cells = rf"{low} to {high} h \| {hours:.0f} h \| {memory} GiB \| {sums[gpu]} h"
        assert re.search(rf"^\| {gpu}.* \| {cells} \|$", readme, re.M)
    for text in (PAGE, tutorial.read_text(encoding="utf-8")):
        assert f"{sums['H100']} hours on one H100" in text
        assert f"{sums['RTX 4090']} hours on one RTX 4090" in text
