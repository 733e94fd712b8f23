"""Training steps of a random Llama through the product's own trainer, with the memory that they
take.

Everything here runs on a CPU as well, where a profiler counts what torch's allocator holds.
"""

import io
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from shapes import llama_config, random_model
from torch import Tensor

from medusa_train.config.schema import TrainConfig
from medusa_train.progress import RunProgress
from medusa_train.training.estimate import Estimate
from medusa_train.training.load_data import load_data
from medusa_train.training.setup import build_trainer
from medusa_train.training.trainer import Trainer
from tests.training.conftest import WORDS, build_tokenizer, metrics

#: hidden size, MLP size, layers, attention heads, key/value heads, vocabulary; large enough on a
# GPU that the matrix library's workspaces are a small part of the memory.
SHAPES = {"cuda": (1024, 2816, 8, 16, 4, 32_000), "cpu": (128, 344, 4, 4, 2, 2048)}
#: words of an answer, of about two tokens each
WORDS_PER_ROW = {"cuda": 500, "cpu": 150}
STEPS = 4


def write_model(out: Path, device: torch.device) -> Path:
    """Write a random Llama of the device's shape, with the tokenizer of the training tests."""
    random_model(llama_config(*SHAPES[device.type]), torch.bfloat16, device).save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    return out


def write_chats(path: Path, words: int) -> Path:
    """Write chats with answers of `words` words."""
    draw = random.Random(0)
    lines = []
    for _ in range(2 * STEPS):
        answer = " ".join(draw.choice(WORDS) for _ in range(words))
        question = " ".join(draw.choice(WORDS) for _ in range(2))
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        lines.append(json.dumps({"conversations": turns}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True)
class Measured:
    """What a few training steps did.

    Attributes:
        trainer: after them. text: what it printed.
        losses: of each step, before its update.
        peak, estimate: bytes in all at the peak of the last step, and as `--inspect` predicts them.
        shape: rows and tokens of that step.
    """

    trainer: Trainer
    text: str
    losses: list[float]
    peak: int
    estimate: int
    shape: tuple[int, int]


def measure(keys: dict[str, Any]) -> Measured:
    """Train `STEPS` steps with the product's trainer and measure the last one."""
    cfg = TrainConfig.model_validate(keys)
    console = Console(file=io.StringIO(), width=200)
    trainer = build_trainer(cfg, load_data(cfg, console), RunProgress(console))
    batches = list(islice(trainer.loader, STEPS))  # the loader repeats its epochs without end
    trainer.recipe.train()
    trainer.draft.train()
    for batch in batches[:-1]:
        trainer.train_step(iter([batch]))
    peak = held_bytes(trainer) + peak_allocated(lambda: trainer.train_step(iter(batches[-1:])))
    rows, width = batches[-1].tokens.shape
    estimate = Estimate(cfg, trainer.recipe.target_model.config).memory(
        rows=rows,
        width=width,
        dtype=trainer.recipe.precision.dtype,
        device=trainer.recipe.precision.device.type,
    )
    losses = [record["loss"] for record in metrics(trainer.run_dir) if record["kind"] == "train"]
    return Measured(trainer, console.file.getvalue(), losses, peak, estimate.total, (rows, width))


def peak_allocated(run: Callable[[], object]) -> int:
    """Return the peak of the bytes that torch's allocator holds beyond those before `run`, exactly."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    held = peak = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def held_bytes(trainer: Trainer) -> int:
    """Return the bytes of weights and optimizer states between two steps."""
    if trainer.recipe.precision.device.type == "cuda":
        return torch.cuda.memory_allocated()
    modules = (trainer.recipe.target_model.model, trainer.draft)
    seen = {tensor.data_ptr(): tensor.nbytes for module in modules for tensor in tensors_of(module)}
    states = (
        value for state in trainer.strategy.optimizer.state.values() for value in state.values()
    )
    return sum(seen.values()) + sum(value.nbytes for value in states if isinstance(value, Tensor))


def tensors_of(module: torch.nn.Module) -> Iterable[Tensor]:
    """Yield parameters, buffers and the scales of quantized weights."""
    for tensor in (*module.parameters(), *module.buffers()):
        yield tensor
        if (state := getattr(tensor, "quant_state", None)) is not None:
            yield from (state.absmax, state.state2.absmax)
