"""Choose how to decode on this machine: in which dtype (`dtype: auto`), whether compiled (`compile: auto`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from medusa_train.checkpoint.load_model import compile_backbone, load_base_model
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import BackboneError
from medusa_train.inference.batch import BatchDecoder
from medusa_train.inference.static.graphs import use_cuda_graphs
from medusa_train.models.backbone import Backbone
from medusa_train.models.compiled import has_compiler
from medusa_train.models.loading import resolve_backbone
from medusa_train.models.precision import (
    WeightMemory,
    default_device,
    emulates_bf16,
    is_out_of_memory,
    release_memory,
)
from medusa_train.progress import RunProgress

PHASE = "choosing the dtype"
PROBE_TOKENS = 33  # one from the prefill, 32 plain steps
PROBE_ROUNDS = 3  # of which the fastest counts: another process may use the machine meanwhile
#: Another dtype than the checkpoint's must be so many times faster: a small difference is noise, and a tree that was
#: fitted in the checkpoint's dtype stays.
CLEARLY_FASTER = 1.1

#: Share of a plain step that compilation is assumed to save, on a GPU beside CUDA graphs, which leave no time between
#: kernels to be saved. The saving depends on the model and the machine, and is only known once the passes are compiled.
SAVING, GPU_SAVING = 0.25, 0.1
COMPILE_SECONDS = 60.0  # assumed for small models
LAYER_SECONDS = 5.0  # and per layer and program for larger ones: 145 s for one of 30 layers on two cores
FACTOR = 2.0  # by which the saving must exceed the cost


# Which dtype?


def choose_dtype(question: str, paths: ModelPaths, progress: RunProgress) -> str:
    """Return the dtype to decode in on this machine, and print the measurements.

    It is the checkpoint's, unless plain steps are `CLEARLY_FASTER` in another one. Measured are float32 and bfloat16,
    and float16 on a GPU (CPUs emulate it), with one backbone in memory at a time, on an answer to `question`. The
    checkpoint's comes first, as the most likely to fit into memory. A dtype in which the weights do not fit is left
    out. Where bfloat16 is emulated, it is used only if the weights fit into memory in no other dtype: plain steps of
    one row may be as fast, but a tree's rows are several times slower.

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
            probes[dtype], memory = _probe(question, paths, dtype, progress)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            progress.print(f"dtype {dtype}: not enough memory; left out")
        release_memory()
    if not probes:
        raise BackboneError(
            f"base_model {paths.base_model}: not enough memory for it in any dtype; free some, or use a larger device"
        )
    seconds = {dtype: probe.step_seconds for dtype, probe in probes.items()}
    stored, fastest = next(iter(seconds)), min(seconds, key=lambda dtype: seconds[dtype])
    best = fastest if seconds[stored] > CLEARLY_FASTER * seconds[fastest] else stored
    reason = "the fastest for plain decoding here" if best == fastest else "the checkpoint's, since none is 10 % faster"
    measured = ", ".join(f"{dtype} {1000 * value:.2f} ms" for dtype, value in seconds.items())
    prepacked = [dtype for dtype, probe in probes.items() if probe.prepacked]
    weights = f"; weights in {' and '.join(prepacked)} prepacked for this CPU" if prepacked else ""
    progress.print(f"dtype: {best}, {reason} ({measured} per step{weights})")
    return best


def _candidates(paths: ModelPaths) -> list[str]:
    names = ["float32", "bfloat16"] + (["float16"] if torch.cuda.is_available() else [])
    config = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)[1]
    stored = str(config.get_text_config().dtype or config.dtype).removeprefix("torch.")
    last = "bfloat16" if emulates_bf16(default_device()) else None
    return sorted(names, key=lambda name: (name == last, name != stored))


class Probe(NamedTuple):
    """Latency of a plain step in one dtype, and whether weights were prepacked for the CPU."""

    step_seconds: float
    prepacked: bool


def _probe(question: str, paths: ModelPaths, dtype: str, progress: RunProgress) -> tuple[Probe, WeightMemory]:
    """Load the backbone as for decoding and time plain steps of an answer; it is released on return."""
    with progress.phase(PHASE, ticking=True):
        backbone = load_base_model(paths, dtype)
        prepacked = backbone.prepack_weights()
        use_cuda_graphs(backbone)
    chat = ChatEncoder(backbone.tokenizer, paths.chat_template, paths.chat_template_kwargs)
    prompt = chat.prompt([Message("user", question)])
    with progress.phase(PHASE):  # not ticking: steps are timed
        seconds = plain_step_seconds(backbone, prompt)
    return Probe(seconds, prepacked), WeightMemory.of(backbone.model, backbone.device)


# Are the passes compiled?


@dataclass(frozen=True)
class CompileEstimate:
    """What compiling would save and cost.

    Attributes:
        steps: plain steps ahead. step_seconds: measured time of one without compilation.
        saving: share of a step that compilation is assumed to save.
        refit_seconds: what fitting the tree to compiled passes takes; negative if it is fitted again without them only.
    """

    steps: int
    step_seconds: float
    saving: float = SAVING
    refit_seconds: float = 0.0
    compile_seconds: float = COMPILE_SECONDS

    @property
    def _seconds(self) -> tuple[float, float]:
        return self.saving * self.steps * self.step_seconds, self.compile_seconds + self.refit_seconds

    @property
    def repaid(self) -> bool:
        """Whether the saving clearly exceeds the cost."""
        saved, cost = self._seconds
        return saved > FACTOR * cost

    def __str__(self) -> str:
        saved, cost = self._seconds
        tree = " and fitting the tree again" if self.refit_seconds > 0 else ""
        relation = "more" if self.repaid else "not more"
        return (
            f"{self.steps:,} steps of {1000 * self.step_seconds:.1f} ms are expected, of which it may save "
            f"{saved:.0f} s, {relation} than {FACTOR:g} times the {cost:.0f} s of "
            f"compilation{tree}"
        )


def compile_if_repaid(
    backbone: Backbone,
    paths: ModelPaths,
    steps: int,
    prompt: list[int],
    report: Callable[[str], None],
    *,
    rows: int = 1,
    trees: bool = True,
    refit_seconds: Callable[[float], float] = lambda step_seconds: 0.0,
) -> None:
    """Compile the decoding passes if that saves time; reports the decision and the reason.

    On a GPU, where the saving is least certain, plain steps are timed again afterwards, and programs that are not
    faster are dropped.

    Args:
        steps: plain steps that are expected. prompt: steps are timed after it.
        rows, trees: what will be decoded, see `Backbone.compile_passes`.
        refit_seconds: from the seconds of a plain step to `CompileEstimate.refit_seconds`.
    """
    if (obstacle := compile_obstacle(backbone)) is not None:
        report(f"compile: no, {obstacle}")
        return
    step = plain_step_seconds(backbone, prompt, rows)
    on_gpu = backbone.device.type == "cuda"
    cost = compile_seconds(backbone, trees=trees)
    estimate = CompileEstimate(steps, step, GPU_SAVING if on_gpu else SAVING, refit_seconds(step), cost)
    report(f"compile: {'yes' if estimate.repaid else 'no'}, {estimate}")
    if not estimate.repaid:
        return
    compile_or_report(backbone, paths, report, rows=rows, trees=trees)
    if on_gpu and backbone.compiled is not None and (compiled := plain_step_seconds(backbone, prompt, rows)) >= step:
        backbone.compiled = None
        report(f"compile: dropped, steps take {1000 * compiled:.1f} ms with compiled passes")


def compile_seconds(backbone: Backbone, *, trees: bool) -> float:
    """Estimate the time that compilation takes: one program for plain steps, and one for trees."""
    return max(COMPILE_SECONDS, LAYER_SECONDS * backbone.num_layers * (2 if trees else 1))


def compile_obstacle(backbone: Backbone) -> str | None:
    """Return why passes can't be compiled here; None if they can."""
    if backbone.compile_obstacle is not None:
        return f"the model {backbone.compile_obstacle}"
    if not has_compiler(backbone.device):
        return "there is no C++ compiler (on a GPU: no Triton)"
    return None


def compile_or_report(
    backbone: Backbone, paths: ModelPaths, report: Callable[[str], None], *, rows: int = 1, trees: bool = True
) -> None:
    """Compile the decoding passes, see `compile_backbone`; a failure is reported, and decoding goes on without."""
    try:
        compile_backbone(backbone, paths, rows=rows, trees=trees)
    except BackboneError as error:
        report(f"{error}\ndecoding without compiled passes")


# How long does a plain step take?


def plain_step_seconds(backbone: Backbone, prompt: list[int], rows: int = 1) -> float:
    """Return the shortest mean time of a plain step of `rows` equal rows in `PROBE_ROUNDS` short answers."""
    decoder = BatchDecoder(backbone)
    tokens = min(PROBE_TOKENS, backbone.max_context)
    prompts = [prompt[-max(1, backbone.max_context - tokens) :]] * rows
    decoder.generate_batch(prompts, tokens, ())  # a warm-up
    rounds = []
    for _ in range(PROBE_ROUNDS):
        last = max(decoder.generate_batch(prompts, tokens, ()), key=lambda out: out.seconds)
        rounds.append((last.seconds - last.prefill_seconds) / max(last.steps, 1))
    return min(rounds)
