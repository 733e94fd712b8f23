"""Choose the dtype to measure in: time plain decoding in each one whose weights fit into memory."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from medusa_train.checkpoint.load_model import load_base_model
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import BackboneError
from medusa_train.evaluation.questions import Bench
from medusa_train.inference.generate import Decoder
from medusa_train.models.backbone import Backbone
from medusa_train.models.loading import resolve_backbone
from medusa_train.models.precision import default_device, emulates_bf16, free_memory
from medusa_train.progress import RunProgress

PHASE = "choosing the dtype"
PROBE_TOKENS = 33  # one from the prefill, 32 plain steps
PROBE_ROUNDS = 3
#: A round counts as disturbed when the reference work beside it takes so many times longer than at best.
DISTURBED = 1.5
REFERENCE_SIZE, REFERENCE_REPEATS = 384, 20


def choose_dtype(bench: Bench, paths: ModelPaths, progress: RunProgress) -> str:
    """Return the dtype with the fastest plain decoding steps on this machine, and print the measurements.

    Measured are float32 and bfloat16, and float16 on a GPU (CPUs emulate it), with one backbone in memory at a time,
    on the first question of `bench`. The dtype of the checkpoint comes first, as the most likely to fit into memory. A
    dtype in which the weights do not fit is left out, and one that was timed while another process used the machine is
    timed again. Where bfloat16 is emulated, it is used only if the weights fit into memory in no other dtype: plain
    steps of one row may be as fast, but a tree's rows are several times slower.

    Raises:
        BackboneError: the backbone cannot be loaded, or fits into memory in no dtype.
    """
    probes: dict[str, Probe] = {}
    memory: WeightMemory | None = None
    for dtype in _candidates(paths):
        if probes and dtype == "bfloat16" and emulates_bf16(default_device()):
            progress.print("dtype bfloat16: emulated on this device, so slow for trees; left out")
            continue
        if memory is not None and not memory.fit(dtype):
            progress.print(f"dtype {dtype}: the weights do not fit into the free memory; left out")
            continue
        try:
            probes[dtype], memory = _probe(bench, paths, dtype, progress)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            progress.print(f"dtype {dtype}: not enough memory; left out")
        release_memory()
    if not probes:
        raise BackboneError(
            f"base_model {paths.base_model}: not enough memory for it in any dtype; free some, or use a larger device"
        )
    for dtype in _disturbed(probes):
        progress.print(f"dtype {dtype}: another process slowed the machine down while it was timed; timing it again")
        again = _probe(bench, paths, dtype, progress)[0]
        probes[dtype] = Probe(probes[dtype].rounds + again.rounds, again.prepacked)
        release_memory()
    if disturbed := _disturbed(probes):
        progress.print(
            f"dtype {', '.join(disturbed)}: another process keeps using the machine; the choice of dtype is unreliable",
            style="yellow",
        )
    return _fastest(probes, progress)


def _disturbed(probes: Mapping[str, Probe]) -> list[str]:
    best = _best_reference(probes)
    return [dtype for dtype, probe in probes.items() if not probe.quiet_steps(best)]


def _fastest(probes: Mapping[str, Probe], progress: RunProgress) -> str:
    reference = _best_reference(probes)
    seconds = {
        dtype: min(probe.quiet_steps(reference) or [one.step for one in probe.rounds])
        for dtype, probe in probes.items()
    }
    best = min(seconds, key=lambda dtype: seconds[dtype])
    measured = ", ".join(f"{dtype} {1000 * value:.2f} ms" for dtype, value in seconds.items())
    prepacked = [dtype for dtype, probe in probes.items() if probe.prepacked]
    weights = f"; weights in {' and '.join(prepacked)} prepacked for this CPU" if prepacked else ""
    progress.print(f"dtype: {best}, the fastest for plain decoding here ({measured} per step{weights})")
    return best


def _candidates(paths: ModelPaths) -> list[str]:
    names = ["float32", "bfloat16"] + (["float16"] if torch.cuda.is_available() else [])
    config = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)[1]
    stored = str(config.get_text_config().dtype or config.dtype).removeprefix("torch.")
    last = "bfloat16" if emulates_bf16(default_device()) else None
    return sorted(names, key=lambda name: (name == last, name != stored))


class Round(NamedTuple):
    """One timed continuation: seconds per plain step, and of the reference work beside it (the longer of two)."""

    step: float
    reference: float


@dataclass(frozen=True)
class Probe:
    """Step latencies in one dtype, and whether weights were prepacked for the CPU."""

    rounds: tuple[Round, ...]
    prepacked: bool

    def quiet_steps(self, best_reference: float) -> list[float]:
        """Return the steps of the rounds beside which the reference work took no longer than usual."""
        return [step for step, reference in self.rounds if reference <= DISTURBED * best_reference]


def _best_reference(probes: Mapping[str, Probe]) -> float:
    return min(one.reference for probe in probes.values() for one in probe.rounds)


def _probe(bench: Bench, paths: ModelPaths, dtype: str, progress: RunProgress) -> tuple[Probe, WeightMemory]:
    """Load the backbone as for decoding and time plain steps on the first question; it is released on return."""
    with progress.phase(PHASE, ticking=True):
        backbone = load_base_model(paths, dtype)
        prepacked = backbone.prepack_weights()
    chat = ChatEncoder(backbone.tokenizer, paths.chat_template, paths.chat_template_kwargs)
    prompt = chat.prompt([Message("user", bench.questions[0].turns[0])])
    with progress.phase(PHASE, PROBE_ROUNDS + 1, "rounds") as phase:
        rounds = time_plain_steps(backbone, prompt, phase.advance)
    return Probe(tuple(rounds), prepacked), WeightMemory.of(backbone.model, backbone.device)


def time_plain_steps(
    backbone: Backbone, prompt_ids: list[int], on_round: Callable[[], None] = lambda: None
) -> list[Round]:
    """Time `PROBE_ROUNDS` short continuations after a warm-up; calls `on_round` after each."""
    decoder = Decoder(backbone)
    tokens = min(PROBE_TOKENS, backbone.max_context)
    prompt = prompt_ids[-max(1, backbone.max_context - tokens) :]
    decoder.generate(prompt, tokens, eos_ids=())
    on_round()
    rounds: list[Round] = []
    before = reference_seconds(backbone.device)
    for _ in range(PROBE_ROUNDS):
        output = decoder.generate(prompt, tokens, eos_ids=())
        after = reference_seconds(backbone.device)
        step = (output.seconds - output.prefill_seconds) / max(output.steps, 1)
        rounds.append(Round(step, max(before, after)))
        before = after
        on_round()
    return rounds


def reference_seconds(device: torch.device) -> float:
    """Time a fixed amount of work, the same for every model and dtype: longer means that the device is shared."""
    matrix = torch.full((REFERENCE_SIZE, REFERENCE_SIZE), 1.0 / REFERENCE_SIZE, device=device)
    started = time.perf_counter()
    product = matrix
    for _ in range(REFERENCE_REPEATS):
        product = product @ matrix
    float(product[0, 0])  # waits for a GPU
    return time.perf_counter() - started


# Messages of CPU allocators (Linux, Windows) and of CUDA calls; PyTorch's CUDA allocator raises its own exception.
_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator|not enough memory|CUDA error: out of memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that a CPU or a GPU ran out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def release_memory() -> None:
    """Free the memory of objects without references, for the next model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class WeightMemory:
    """Memory of a model's weights: `numbers` are stored in the dtype, `quantized` bytes are the same in every dtype."""

    device: torch.device
    numbers: int
    quantized: int

    @classmethod
    def of(cls, model: nn.Module, device: torch.device) -> WeightMemory:
        """Count the weights of a loaded model."""
        parameters = list(model.parameters())
        return cls(
            device,
            sum(p.numel() for p in parameters if p.is_floating_point()),
            sum(p.numel() * p.element_size() for p in parameters if not p.is_floating_point()),
        )

    def fit(self, dtype: str) -> bool:
        """Return whether the weights alone, loaded once more in `dtype`, fit into the memory that is free now."""
        free = free_memory(self.device)
        return free is None or self.numbers * getattr(torch, dtype).itemsize + self.quantized <= free
