"""Write the tables of docs/large_models.md: what `--inspect` estimates for models of today (memory,
disk and hours), the memory of decoding, and the least hours in which a model can write its text.

    python benchmarks/estimates.py

Takes seconds and no weights: shapes are those of the models' published configurations.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

import torch  # noqa: E402
from result_tables.writing import table  # noqa: E402
from shapes import Sizes  # noqa: E402
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config  # noqa: E402

from medusa_train.config.load import load_config, stage_one_config  # noqa: E402
from medusa_train.config.schema import TrainConfig  # noqa: E402
from medusa_train.training.estimate import GPUS, Estimate, estimate_hours, rate_of  # noqa: E402

PAGE = ROOT / "docs" / "large_models.md"
TOKENS = 60_000_000  # of one epoch: 60,000 conversations of 1,000 tokens, of which 70 % are answers
SUPERVISED = 0.7
GIB = 2**30
#: Bytes that a GPU reads per second, by the vendors' data sheets.
BANDWIDTH = {
    "RTX 4090, 24 GB": 1.008e12,
    "L40S, 48 GB": 0.864e12,
    "H100, 80 GB": 3.35e12,
    "A100, 80 GB": 2.039e12,
}
#: Positions that an answer's rows have on average while the model writes its text.
POSITIONS = 1024
#: Most conversations that are answered together.
MOST_ROWS = 64
#: Share of a GPU's memory that weights and cache may take.
USABLE = 0.9
HALF = 2  # bytes of a number in bfloat16

LLAMA_8B = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131_072,
)  # fmt: skip
VICUNA_7B = LlamaConfig(
    vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=4096,
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
ONE_ROW = ["micro_batch_size=1", "gradient_accumulation_steps=32"]  # the batch stays the same
HALF_ROW = "sequence_len=4096"
#: Configuration, shape, and the overrides with which a GPU of 24, 48 and 80 GB is enough, in the
#: order of GPUS; the second GPU of 80 GB has those of the first.
ROWS: list[tuple[str, PretrainedConfig, list[list[str]]]] = [
    ("llama31_8b_m1", LLAMA_8B, [[NF4, FEW_TOKENS, *ONE_ROW], [NF4], []]),
    ("llama31_8b_m2", LLAMA_8B, [["stage_one." + NF4, FEW_TOKENS], ["stage_one." + NF4], []]),
    ("qwen3_8b_m1", QWEN3_8B, [[NF4, FEW_TOKENS, HALF_ROW], [NF4, HALF_ROW], []]),
    ("llama31_8b_eagle3", LLAMA_8B, [[NF4, *ONE_ROW], [NF4], []]),
    ("qwen3_8b_eagle3", QWEN3_8B, [[NF4, *ONE_ROW, HALF_ROW], [NF4], []]),
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


def training_table() -> str:
    """Return one row for each configuration and GPU: memory, disk and hours of training."""
    rows = []
    for name, shape, settings in ROWS:
        wanted = settings if len(settings) < 3 else [*settings, settings[2]]
        for gpu, overrides in zip(GPUS, wanted, strict=False):
            rows.append(estimate_row(name, shape, overrides, gpu))
    # the run whose hours the Medusa paper reports, to compare the estimate with
    rows.append(estimate_row("vicuna7b_m1", VICUNA_7B, [], "A100, 80 GB"))
    return table(("configuration", "with", "GPU", "memory:", "disk:", "epochs:", "hours:"), rows)


@dataclass(frozen=True)
class Decoding:
    """Bytes that decoding takes, by what they are for."""

    weights: float
    draft: float
    cache: float

    @property
    def total(self) -> float:
        """All bytes."""
        return self.weights + self.draft + self.cache


def decoding_memory(
    cfg: TrainConfig,
    shape: PretrainedConfig,
    positions: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Decoding:
    """Estimate what decoding a single row of `positions` positions in `dtype` takes.

    A draft has the backbone's dtype in decoding. EAGLE-3 has keys and values of a layer of its own.
    """
    memory = Estimate(cfg, shape).memory(rows=1, width=1, dtype=dtype, device="cuda")
    sizes = Sizes.of(shape)
    layers_of_draft = 1 if cfg.draft == "eagle3" else 0
    share_of_draft = layers_of_draft / sizes.layers
    return Decoding(
        weights=memory.parts["backbone, frozen"],
        draft=memory.trained * dtype.itemsize,
        cache=sizes.cached(positions, 1) * dtype.itemsize * (1 + share_of_draft),
    )


#: Drafts of the table of decoding: what it is called, configuration, overrides.
DECODED = [
    ("Medusa-1, all tokens", "llama31_8b_m1", []),
    ("Medusa-1, all tokens, 4-bit model", "llama31_8b_m1", [NF4]),
    ("Medusa-1, 32,768 tokens", "llama31_8b_m1", [FEW_TOKENS]),
    ("Medusa-1, 32,768 tokens, 4-bit model", "llama31_8b_m1", [NF4, FEW_TOKENS]),
    ("Medusa-1 with the model's lm_head", "llama31_8b_m1", ["medusa_share_lm_head=true"]),
    ("EAGLE-3", "llama31_8b_eagle3", []),
    ("EAGLE-3, 4-bit model", "llama31_8b_eagle3", [NF4]),
]


def decoding_table() -> str:
    """Return the memory of decoding one row of 4,096 positions, by draft, for Llama 3.1 8B.

    The last column is that of the answers that an evaluation compares in float32.
    """
    rows = []
    for title, name, overrides in DECODED:
        cfg = load_config(TrainConfig, ROOT / "configs" / f"{name}.yaml", overrides)
        memory = decoding_memory(cfg, LLAMA_8B, 4096)
        in_float32 = decoding_memory(cfg, LLAMA_8B, 4096, torch.float32)
        parts = (memory.weights, memory.draft, memory.cache, memory.total, in_float32.total)
        rows.append([title, *(f"{part / GIB:.1f} GiB" for part in parts)])
    head = ("draft of Llama 3.1 8B", "model:", "draft:", "cache:", "together:", "in float32:")
    return table(head, rows)


def least_step(shape: PretrainedConfig, gpu: str) -> tuple[int, float]:
    """Return how many rows a GPU decodes together, and the least seconds of their step.

    The step reads the weights and every row's keys and values once, or is bound by its products.
    """
    sizes = Sizes.of(shape)
    cache_of_row = sizes.cached(POSITIONS, 1) * HALF
    gigabytes = int(gpu.split()[-2])
    free = USABLE * gigabytes * 1e9 - sizes.total * HALF
    rows = min(MOST_ROWS, int(free / cache_of_row))
    seconds_of_reading = (sizes.read * HALF + rows * cache_of_row) / BANDWIDTH[gpu]
    seconds_of_products = sizes.step_operations(1, POSITIONS, rows) / GPUS[gpu]
    return rows, max(seconds_of_reading, seconds_of_products)


def hours_of_text(shape: PretrainedConfig, gpu: str) -> float:
    """Return the least hours in which a model can write the answers of an epoch's text."""
    rows, seconds = least_step(shape, gpu)
    return SUPERVISED * TOKENS * seconds / rows / 3600


def data_table() -> str:
    """Return the least hours in which Llama 3.1 8B can write the text of an epoch, by GPU."""
    answers = SUPERVISED * TOKENS
    rows = []
    for gpu in GPUS:
        together, seconds = least_step(LLAMA_8B, gpu)
        rate = together / seconds
        hours = f"{answers / rate / 3600:.1f}"
        rows.append([gpu, together, f"{1000 * seconds:.1f} ms", f"{rate:,.0f}", hours])
    head = ("GPU", "answers at once:", "step, at least:", "tokens/s, at most:", "hours, at least:")
    return table(head, rows)


def summary_table() -> str:
    """Return for Llama 3.1 8B and each GPU: text, and both drafts' training and decoding."""
    rows = []
    for number, gpu in enumerate(GPUS):
        least = hours_of_text(LLAMA_8B, gpu)
        cells: list[Any] = [gpu, f"{2 * least:.0f} to {3 * least:.0f} h"]
        for name, shape, settings in ROWS:
            if name not in ("llama31_8b_m1", "llama31_8b_eagle3"):
                continue
            overrides = settings[min(number, 2)]
            _, with_keys, _, memory, _, _, hours = estimate_row(name, shape, overrides, gpu)
            is_4bit = NF4 in with_keys
            cfg = load_config(TrainConfig, ROOT / "configs" / f"{name}.yaml", overrides)
            decoding = decoding_memory(cfg, shape, 4096).total / GIB
            cells.append(f"{hours} h, {memory}{', 4-bit' if is_4bit else ''}")
            cells.append(f"{decoding:.0f} GiB")
        rows.append(cells)
    head = ("one GPU", "text:", "train Medusa-1:", "decode:")
    return table((*head, "train EAGLE-3:", "decode:"), rows)


#: The blocks of the page.
TABLES = {
    "summary": summary_table,
    "data": data_table,
    "estimates": training_table,
    "decoding": decoding_table,
}


def page(text: str) -> str:
    """Return the page with its tables written again."""
    for name, make in TABLES.items():
        start = f"<!-- {name}:start -->"
        end = f"<!-- {name}:end -->"
        before, rest = text.split(start)
        after = rest.split(end)[1]
        text = f"{before}{start}\n{make()}\n{end}{after}"
    return text


def main() -> None:
    written = page(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(written, encoding="utf-8")
    for make in TABLES.values():
        print(make(), end="\n\n")


if __name__ == "__main__":
    main()
