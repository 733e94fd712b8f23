"""Choose how to decode on this machine: in which dtype (`dtype: auto`), whether compiled (`compile:
auto`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from medusa_train.checkpoint.load_model import (
    auto_dtype_of,
    compile_backbone,
    load_backbone_without_adapter,
)
from medusa_train.checkpoint.resolve import SPLIT_ATTENTION, ModelPaths
from medusa_train.checkpoint.run_directory import DECISIONS, writing
from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import BackboneError
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.cuda_graphs import use_cuda_graphs
from medusa_train.io import parse_json, replace_text
from medusa_train.models.backbone import Backbone
from medusa_train.models.compiled import has_compiler, needed_forms
from medusa_train.models.loading import resolve_backbone
from medusa_train.models.precision import (
    WeightMemory,
    catch_out_of_memory,
    default_device,
    device_name,
    emulates,
    release_memory,
)
from medusa_train.models.prepack import prepack_linears
from medusa_train.progress import RunProgress

PHASE = "choosing the dtype"
DTYPES = ("float32", "bfloat16", "float16")
PROBE_TOKENS = 33  # one from the prefill, 32 plain steps
PROBE_ROUNDS = 3  # of which the fastest counts: another process may use the machine meanwhile
#: Another dtype than the checkpoint's must be so many times faster: a small difference is noise,
# and a tree that was fitted in the checkpoint's dtype stays.
CLEARLY_FASTER = 1.2

#: Share of a plain step that compilation is assumed to save, on a GPU beside CUDA graphs (0.10 at
# 7B shape on an H100). The saving depends on the model and the machine, and is only known once
# the passes are compiled.
SAVING, GPU_SAVING = 0.25, 0.1
COMPILE_SECONDS = 60.0  # assumed for small models
# and per layer and program for larger ones: 145 s for one of 30 layers on two cores
LAYER_SECONDS = 5.0
FACTOR = 2.0  # by which the saving must exceed the cost


# What was decided before?


class Decisions:
    """What was chosen by a timing, kept in a run directory, so that it does not change with the
    noise of a later one.

    Args:
        directories: where to look for decisions, the first one first; new ones are written to the
            last.
    """

    def __init__(self, *directories: Path) -> None:
        self._files = [directory / DECISIONS for directory in directories]

    def find(self, kind: str, conditions: Mapping[str, Any]) -> tuple[Any, Path] | None:
        """Return what was decided under equal conditions, and the file that says so."""
        for file in self._files:
            for one in _read_decisions(file):
                if one["kind"] == kind and one["conditions"] == conditions:
                    return one["value"], file
        return None

    def keep(self, kind: str, conditions: Mapping[str, Any], value: object) -> None:
        """Write a decision in place of earlier ones of its kind under equal conditions."""
        file = self._files[-1]
        others = [
            one
            for one in _read_decisions(file)
            if one["kind"] != kind or one["conditions"] != conditions
        ]
        decision = {"kind": kind, "conditions": dict(conditions), "value": value}
        with writing(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, json.dumps([*others, decision], indent=1) + "\n")


def _read_decisions(file: Path) -> list[dict[str, Any]]:
    """Read the decisions of a file; none where it is missing or damaged: they are made again."""
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(found, list):
        return []
    keys = {"kind", "conditions", "value"}
    return [one for one in found if isinstance(one, dict) and set(one) == keys]


def _conditions(paths: ModelPaths) -> dict[str, Any]:
    """Return on what the speed of a dtype depends."""
    device = default_device()
    conditions: dict[str, Any] = {
        "base_model": paths.base_model,
        "backbone": paths.backbone_form,
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }
    if paths.gpu_kernels:
        conditions["gpu_kernels"] = list(paths.gpu_kernels)
    return conditions


# Which dtype?


def decide_dtype(
    question: str, paths: ModelPaths, decisions: Decisions, progress: RunProgress
) -> str:
    """Return the dtype that was chosen for this run on such a machine, or choose it, see
    `choose_dtype`.

    A CPU that emulates bfloat16 takes float32, if the weights fit into memory in it: plain steps of
    one row may be as fast in bfloat16, but a tree's rows are several times slower.
    """
    device = default_device()
    if device.type == "cpu" and emulates(device, torch.bfloat16):
        return auto_dtype_of(paths, progress.print)
    conditions = _conditions(paths)
    earlier = decisions.find("dtype", conditions)
    if earlier is not None and earlier[0] in DTYPES:
        progress.print(
            f"dtype: {earlier[0]}, as chosen before ({earlier[1]}; dtype=NAME sets another)"
        )
        return str(earlier[0])
    dtype = choose_dtype(question, paths, progress)
    decisions.keep("dtype", conditions, dtype)
    return dtype


def choose_dtype(question: str, paths: ModelPaths, progress: RunProgress) -> str:
    """Return the dtype to decode in on this machine, and print the measurements.

    It is the checkpoint's, unless plain steps are `CLEARLY_FASTER` in another one. Measured are
    float32, bfloat16 unless the device emulates it, and float16 on a GPU, with one backbone in
    memory at a time, on an answer to `question`. The checkpoint's comes first, as the most likely to
    fit into memory. A dtype in which the weights do not fit is left out.

    Raises:
        BackboneError: the backbone cannot be loaded, or fits into memory in no dtype.
    """
    seconds: dict[str, float] = {}
    memory: WeightMemory | None = None
    for dtype in _candidates(paths):
        if dtype == "float32" and SPLIT_ATTENTION in paths.gpu_kernels:
            progress.print(f"dtype float32: {SPLIT_ATTENTION} takes 16 bits; left out")
            continue
        if memory is not None and not memory.fit(dtype):
            progress.print(f"dtype {dtype}: the weights do not fit into the free memory; left out")
            continue
        with catch_out_of_memory() as caught:
            seconds[dtype], memory = _time_dtype(question, paths, dtype, progress)
        if caught:
            progress.print(f"dtype {dtype}: not enough memory; left out")
        release_memory()
    if not seconds:
        raise BackboneError(
            f"base_model {paths.base_model}: not enough memory in any dtype; free some"
        )
    stored, fastest = next(iter(seconds)), min(seconds, key=lambda dtype: seconds[dtype])
    best = fastest if seconds[stored] > CLEARLY_FASTER * seconds[fastest] else stored
    reason = (
        "the fastest for plain decoding here"
        if best == fastest
        else "kept, since no other is 20 % faster"
    )
    measured = ", ".join(f"{dtype} {1000 * value:.2f} ms" for dtype, value in seconds.items())
    progress.print(f"dtype: {best}, {reason} ({measured} per step)")
    return best


def _candidates(paths: ModelPaths) -> list[str]:
    names = ["float32"]
    if not emulates(default_device(), torch.bfloat16):
        names.append("bfloat16")
    if torch.cuda.is_available():
        names.append("float16")
    config = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)[1]
    stored = str(config.get_text_config().dtype or config.dtype).removeprefix("torch.")
    return sorted(names, key=lambda name: name != stored)


def _time_dtype(
    question: str, paths: ModelPaths, dtype: str, progress: RunProgress
) -> tuple[float, WeightMemory]:
    """Load the backbone as for decoding and return the seconds of a plain step; it is released on
    return.
    """
    with progress.phase(PHASE, ticking=True):
        backbone = load_backbone_without_adapter(paths, dtype)
        backbone.use_gpu_kernels(paths.gpu_kernels)
        prepack_linears(backbone.model)
        use_cuda_graphs(backbone)
    chat = ChatEncoder(backbone.tokenizer, paths.chat_template, paths.chat_template_kwargs)
    prompt = chat.prompt([Message("user", question)])
    with progress.phase(PHASE):  # not ticking: steps are timed
        seconds = plain_step_seconds(backbone, prompt)
    return seconds, WeightMemory.of(backbone.model, backbone.device)


# Are the passes compiled?


def compile_if_repaid(
    backbone: Backbone,
    paths: ModelPaths,
    steps: int,
    prompt: list[int],
    report: Callable[[str], None],
    *,
    rows: int = 1,
    trees: bool = True,
    tree_program: bool = False,
) -> bool | None:
    """Compile the decoding passes if that saves time; reports the decision and the reason.

    Returns:
        Whether passes are compiled, as decided by timing; None where they cannot be.

    On a GPU, where the saving is least certain, plain steps are timed again afterwards, and
    programs that are not faster are dropped.

    Args:
        steps: plain steps that are expected. prompt: steps are timed after it.
        rows, trees: what will be decoded, see `Backbone.compile_passes`.
        tree_program: whether passes over a tree are compiled afterwards, see
            `Backbone.compile_tree`.
    """
    if (obstacle := compile_obstacle(backbone)) is not None:
        report(f"compile: no, {obstacle}")
        return None
    step = plain_step_seconds(backbone, prompt, rows)
    on_gpu = backbone.device.type == "cuda"
    saved = (GPU_SAVING if on_gpu else SAVING) * steps * step
    programs = len(needed_forms(rows, trees))
    if tree_program and rows == 1 and not on_gpu:
        programs += 1
    cost = max(COMPILE_SECONDS, LAYER_SECONDS * backbone.num_layers * programs)
    is_repaid = saved > FACTOR * cost
    report(
        f"compile: {'yes' if is_repaid else 'no'}, {steps:,} steps of {1000 * step:.1f} ms are"
        f" expected, of which it may save {saved:.0f} s, {'' if is_repaid else 'not '}more than"
        f" {FACTOR:g} times the {cost:.0f} s it takes"
    )
    if not is_repaid:
        return False
    compile_or_report(backbone, paths, report, rows=rows, trees=trees)
    if backbone.compiled is None:
        return None
    if on_gpu and (compiled := plain_step_seconds(backbone, prompt, rows)) >= step:
        backbone.compiled = None
        report(f"compile: dropped, steps take {1000 * compiled:.1f} ms with compiled passes")
        return False
    return True


def compile_obstacle(backbone: Backbone) -> str | None:
    """Return why passes can't be compiled here; None if they can."""
    if backbone.compile_obstacle is not None:
        return f"the model {backbone.compile_obstacle}"
    if not has_compiler(backbone.device):
        return "there is no C++ compiler (on a GPU: no Triton)"
    return None


def compile_or_report(
    backbone: Backbone,
    paths: ModelPaths,
    report: Callable[[str], None],
    *,
    rows: int = 1,
    trees: bool = True,
) -> None:
    """Compile the decoding passes, see `compile_backbone`; a failure is reported, and decoding goes
    on without.
    """
    try:
        compile_backbone(backbone, paths, rows=rows, trees=trees)
    except BackboneError as error:
        report(f"{error}\ndecoding without compiled passes")


# How long does a plain step take?


def plain_step_seconds(backbone: Backbone, prompt: list[int], rows: int = 1) -> float:
    """Return the shortest mean time of a plain step of `rows` equal rows in `PROBE_ROUNDS` short
    answers.
    """
    return min(plain_step_rounds(backbone, prompt, rows))


def plain_step_rounds(
    backbone: Backbone, prompt: list[int], rows: int = 1, most_tokens: int | None = None
) -> list[float]:
    """Return the mean seconds of a plain step of `rows` equal rows in each of `PROBE_ROUNDS` equal
    answers.

    Args:
        most_tokens: of an answer, the prefill's included; None: `PROBE_TOKENS`.
    """
    decoder = BatchDecoder(backbone)
    tokens = min(most_tokens or PROBE_TOKENS, backbone.max_context)
    prompts = [prompt[-max(1, backbone.max_context - tokens) :]] * rows
    decoder.generate_batch(prompts, tokens, ())  # a warm-up
    rounds = []
    for _ in range(PROBE_ROUNDS):
        last = max(decoder.generate_batch(prompts, tokens, ()), key=lambda out: out.seconds)
        rounds.append((last.seconds - last.prefill_seconds) / max(last.steps, 1))
    return rounds
