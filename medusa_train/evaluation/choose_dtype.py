"""Which dtype to measure in: times plain decoding in each that fits into memory. Knows no tree."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import nn

from medusa_train.checkpoint.load import load_base_model
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import BackboneError
from medusa_train.evaluation.questions import Bench
from medusa_train.inference.generate import Decoder
from medusa_train.models.backbone import Backbone
from medusa_train.models.loading import resolve_backbone
from medusa_train.models.precision import free_memory
from medusa_train.progress import RunProgress

PROBE_TOKENS = 33  # one from the prefill, 32 plain steps
PROBE_ROUNDS = 3


def choose_dtype(bench: Bench, paths: ModelPaths, console: Console) -> str:
    """`fastest_dtype` on the first question of a bench; says on the console what was found."""

    def prompt_of(backbone: Backbone) -> list[int]:
        chat = ChatEncoder(backbone.tokenizer, paths.chat_template)
        return chat.prompt([Message("user", bench.questions[0].turns[0])])

    with RunProgress(console).phase("choosing the dtype"):
        return fastest_dtype(paths, prompt_of, lambda line: console.print(line, highlight=False))


def fastest_dtype(paths: ModelPaths, prompt_of: Callable[[Backbone], list[int]], note: Callable[[str], None]) -> str:
    """The dtype in which plain decoding has the fastest steps on this machine.

    Measures float32 and bfloat16, and float16 on a GPU only (CPUs emulate it), one after the other, keeping one
    backbone in memory at a time. The dtype of the checkpoint's files comes first, as the likeliest to fit; one whose
    weights do not fit into memory is left out. `prompt_of` makes a prompt to continue; `note` takes the lines that
    say what was found.

    Raises:
        BackboneError: the backbone fits into memory in no dtype, or can't be loaded at all.
    """
    seconds: dict[str, float] = {}
    packed: list[str] = []
    weights: WeightMemory | None = None
    for dtype in _candidates(paths):
        if weights is not None and not weights.fit(dtype):
            note(f"dtype {dtype}: the weights alone would not fit into the free memory; left out")
            continue
        try:
            seconds[dtype], weights, is_prepacked = _probe(paths, dtype, prompt_of)
            packed += [dtype] if is_prepacked else []
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            note(f"dtype {dtype}: not enough memory; left out")
        release_memory()
    if not seconds:
        raise BackboneError(
            f"base_model {paths.base_model}: not enough memory for it here in any dtype; "
            "free some, or measure on a larger device"
        )
    best = min(seconds, key=lambda dtype: seconds[dtype])
    shown = ", ".join(f"{dtype} {1000 * value:.2f} ms" for dtype, value in seconds.items())
    laid_out = f"; weights in {' and '.join(packed)} laid out for this CPU" if packed else ""
    note(f"dtype: {best}, the fastest for plain decoding here ({shown} per step{laid_out})")
    return best


def _candidates(paths: ModelPaths) -> list[str]:
    names = ["float32", "bfloat16"] + (["float16"] if torch.cuda.is_available() else [])
    config = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)[1]
    stored = str(config.get_text_config().dtype or config.dtype).removeprefix("torch.")
    return sorted(names, key=lambda name: name != stored)


def _probe(
    paths: ModelPaths, dtype: str, prompt_of: Callable[[Backbone], list[int]]
) -> tuple[float, WeightMemory, bool]:
    """A step's latency as `load_with_draft` would decode, what the weights take, and whether they were laid out anew.

    The backbone is let go on return.
    """
    backbone = load_base_model(paths, dtype)
    packed = backbone.prepack_weights()
    return plain_step_seconds(backbone, prompt_of(backbone)), WeightMemory.of(backbone.model, backbone.device), packed


def plain_step_seconds(backbone: Backbone, prompt_ids: list[int]) -> float:
    """Latency of a plain decoding step in seconds: the fastest of a few short continuations, after a warm-up."""
    decoder = Decoder(backbone)
    tokens = min(PROBE_TOKENS, backbone.max_context)
    prompt = prompt_ids[-max(1, backbone.max_context - tokens) :]
    decoder.generate(prompt, tokens, eos_ids=())
    rounds = [decoder.generate(prompt, tokens, eos_ids=()) for _ in range(PROBE_ROUNDS)]
    return min((made.seconds - made.prefill_seconds) / max(made.steps, 1) for made in rounds)


# Of CPU allocators (Linux, Windows) and CUDA calls; PyTorch's own CUDA allocator has an exception of its own.
_MESSAGES = re.compile(
    r"DefaultCPUAllocator|not enough memory|CUDA error: out of memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory did not suffice, on a CPU or on a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None


def release_memory() -> None:
    """Give back what nobody refers to any more, for the next model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class WeightMemory:
    """What a model's weights take: `numbers` of them are stored in the dtype, `packed` bytes are quantised ones."""

    device: torch.device
    numbers: int
    packed: int

    @classmethod
    def of(cls, model: nn.Module, device: torch.device) -> WeightMemory:
        """Count those of a loaded model."""
        parameters = list(model.parameters())
        return cls(
            device,
            sum(p.numel() for p in parameters if p.is_floating_point()),
            sum(p.numel() * p.element_size() for p in parameters if not p.is_floating_point()),
        )

    def fit(self, dtype: str) -> bool:
        """Whether the weights alone would fit into what is free now, loaded once more in `dtype`."""
        free = free_memory(self.device)
        return free is None or self.numbers * getattr(torch, dtype).itemsize + self.packed <= free
