"""Write the table of docs/training.md: memory, disk and hours that `--inspect` estimates for models
of today.

    python benchmarks/estimates.py

Takes seconds and no weights: shapes are those of the models' published configurations.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config  # noqa: E402

from medusa_train.config.load import load_config, stage_one_config  # noqa: E402
from medusa_train.config.schema import TrainConfig  # noqa: E402
from medusa_train.training.estimate import GPUS, Estimate, estimate_hours, rate_of  # noqa: E402

PAGE = ROOT / "docs" / "training.md"
START, END = "<!-- estimates:start -->", "<!-- estimates:end -->"
TOKENS = 60_000_000  # of one epoch: 60,000 conversations of 1,000 tokens, of which 70 % are answers
SUPERVISED = 0.7
GIB = 2**30

LLAMA_8B = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131_072,
)  # fmt: skip
QWEN3_8B = Qwen3Config(
    vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
)  # fmt: skip
QWEN3_06B = Qwen3Config(
    vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
)  # fmt: skip

NF4 = "load_in_4bit=true"
FEW_TOKENS = "medusa_vocab_size=32768"
ONE_ROW = "micro_batch_size=1"
HALF_ROW = "sequence_len=4096"
#: Configuration, shape, and the overrides with which a GPU of 24, 48 and 80 GB is enough, in the
#: order of GPUS; the second GPU of 80 GB has those of the first.
ROWS: list[tuple[str, PretrainedConfig, list[list[str]]]] = [
    ("llama31_8b_m1", LLAMA_8B, [[NF4, FEW_TOKENS, ONE_ROW], [NF4], []]),
    ("llama31_8b_m2", LLAMA_8B, [["stage_one." + NF4, FEW_TOKENS], ["stage_one." + NF4], []]),
    ("qwen3_8b_m1", QWEN3_8B, [[NF4, FEW_TOKENS, HALF_ROW], [NF4, HALF_ROW], []]),
    ("llama31_8b_eagle3", LLAMA_8B, [[NF4, ONE_ROW], [NF4], []]),
    ("qwen3_8b_eagle3", QWEN3_8B, [[NF4, ONE_ROW, HALF_ROW], [NF4], []]),
    ("qwen3_06b_m1", QWEN3_06B, [[]]),
]


def estimate_row(name: str, shape: PretrainedConfig, overrides: list[str], gpu: str) -> list[str]:
    """Return the cells of one configuration, in configs/ or by its path, with `overrides` on `gpu`."""
    path = Path(name) if name.endswith(".yaml") else ROOT / "configs" / f"{name}.yaml"
    run = load_config(TrainConfig, path, overrides)
    total, disk, hours = 0.0, 0.0, 0.0
    epochs = []
    for cfg in filter(None, (stage_one_config(run), run)):
        width, estimate = int(cfg.sequence_len), Estimate(cfg, shape)
        memory = estimate.memory(
            rows=cfg.micro_batch_size, width=width, dtype=torch.bfloat16, device="cuda"
        )
        total = max(total, memory.total)
        disk += (cfg.save_total_limit + 1) * memory.checkpoint + 2 * memory.weights
        epochs.append(f"{cfg.num_epochs:g}")
        text = {"tokens": TOKENS, "supervised": round(SUPERVISED * TOKENS)}
        text["width"] = width if cfg.sample_packing else 1000
        hours += estimate_hours(
            estimate.operations(**text, epochs=cfg.num_epochs), rate_of(cfg), GPUS[gpu]
        )
    cells: list[Any] = [f"`{name}`", " ".join(f"`{one}`" for one in overrides) or "as it is", gpu]
    cells += [f"{total / GIB:.0f} GiB", f"{disk / GIB:.0f} GiB", " + ".join(epochs), f"{hours:.1f}"]
    return cells


def make_table() -> str:
    """Return the table in Markdown, with one row for each configuration and GPU."""
    lines = [
        "| configuration | with | GPU | memory | disk | epochs | hours |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for name, shape, settings in ROWS:
        wanted = settings if len(settings) < 3 else [*settings, settings[2]]
        for gpu, overrides in zip(GPUS, wanted, strict=False):
            lines.append("| " + " | ".join(estimate_row(name, shape, overrides, gpu)) + " |")
    return "\n".join(lines)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{START}\n{make_table()}\n{END}{after}", encoding="utf-8")
    print(make_table())


if __name__ == "__main__":
    main()
