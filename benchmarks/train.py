"""How much time and memory does a training step take at the shape of a 7B model? Meant for a GPU.

    python benchmarks/train.py --parts shape7b
    python benchmarks/train.py --quick                   # a small model if there is no GPU

Parts:

- `medusa1_7b`, `medusa2_7b`: the micro-batches that the recipe's configuration accumulates, and the
  optimizer. Medusa-2 includes its teacher's pass.
- `shape7b`: both.
- `compiled7b`: Medusa-1 with torch_compile, which Medusa-2 does not support.
- `packed7b`: Medusa-1 on rows of several documents, with the fastest attention that is installed.
  The page shows which one.
- `unchecked7b`: Medusa-2 without gradient checkpointing.

Every case runs in its own process. Writes train.md and train.json to `--out` after every case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from checkout import ROOT
from shapes import (
    SHAPES,
    SMALL_LLAMA,
    Sizes,
    llama_config,
    matrix_rate,
    quantize_nf4,
    random_model,
)
from shared import (
    command_line,
    machine_facts,
    stand_in_note,
    table,
    warn_if_busy,
    write_page,
)
from torch import Tensor

from medusa_train.cli.common import quiet_libraries
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import Batch
from medusa_train.losses.graph_cut import GraphCut
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.loading import choose_attention
from medusa_train.models.precision import (
    Precision,
    default_device,
    free_memory,
    is_out_of_memory,
    release_memory,
)
from medusa_train.models.target_model import TargetModel
from medusa_train.training.estimate import Estimate
from medusa_train.training.optimizer import build_optimizer, parameter_groups
from medusa_train.training.target_model_recipe import build_target_model_recipe

#: The step that each part measures: recipe and method.
STEPS = {
    "medusa1_7b": ("shape1", "ours"),
    "medusa2_7b": ("shape2", "ours"),
    "compiled7b": ("shape1", "compiled"),
    "packed7b": ("shape1", "packed"),
    "unchecked7b": ("shape2", "unchecked"),
}
#: Configuration of each recipe; model and data are replaced.
CONFIGS = {"shape1": "vicuna7b_m1.yaml", "shape2": "vicuna7b_m2.yaml"}
METHOD_TITLES = {
    "compiled": ", compiled",
    "packed": ", packed rows",
    "unchecked": ", no gradient checkpointing",
}
PARTS = ("shape7b", *STEPS)
#: Lengths of the documents in a packed row, as shares of the row.
DOCUMENTS = (0.06, 0.31, 0.13, 0.25, 0.25)
TITLES = {
    "shape1": "Medusa-1, 7B shape, frozen target model in bfloat16",
    "shape2": "Medusa-2, 7B shape, QLoRA (NF4)",
}


@dataclass(frozen=True)
class Case:
    """A measurement.

    Attributes:
        what: one of `TITLES`.
        method: `ours`, `compiled` (with torch_compile), `packed` (several documents in a row), or
            `unchecked` (without gradient checkpointing).
        dtype: dtype of the target model.
        tokens: length of a row.
        heads: number of the draft's heads.
        rows: rows of a micro-batch.
        accumulation: micro-batches of an optimizer step.
        repeats: most repeats.
        seconds: no further repeat begins after this many seconds.
    """

    what: str
    method: str
    dtype: str = "bfloat16"
    tokens: int = 2048
    heads: int = 5
    rows: int = 1
    accumulation: int = 1
    repeats: int = 3
    seconds: float = 20.0


@dataclass
class Result:
    """Time and memory of a case.

    Attributes:
        fits: False if the memory was too small.
        seconds: seconds of each repeat.
        loss: loss of the last repeat.
        tokens: number of tokens of one repeat.
        peak: bytes in addition to parameters, gradients and optimizer states.
        total: measured bytes in total.
        estimate: bytes in total, as `--inspect` estimates them.
        operations: operations of one step.
        rate: operations per second of a large matrix product.
        attention: description of the attention implementation (packed rows only).
    """

    fits: bool
    seconds: list[float]
    loss: float = 0.0
    tokens: int = 0
    peak: int = 0
    total: int = 0
    estimate: int = 0
    operations: int = 0
    rate: float = 0.0
    attention: str | None = None

    @property
    def median(self) -> float:
        """Median seconds of a repeat; infinite if the case does not fit."""
        return median(self.seconds or [math.inf])


def repeated(step: Callable[[], float], case: Case) -> tuple[list[float], float]:
    """Return the seconds of each repeat of `step`, and the last value. `step` returns a number, so
    it waits for the GPU.
    """
    seconds: list[float] = []
    value = 0.0
    while not seconds or (len(seconds) < case.repeats and sum(seconds) < case.seconds):
        started = time.perf_counter()
        value = step()
        seconds.append(time.perf_counter() - started)
    return seconds, value


def device_and_precision(case: Case) -> Precision:
    """Return the device that torch finds, with the case's dtype."""
    return Precision(default_device(), getattr(torch, case.dtype))


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Sum the bytes of tensors; other values are ignored."""
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


class Step:
    """One optimizer step: forward, loss and backward for each micro-batch, then gradient clipping
    and the optimizer.
    """

    def __init__(self, cfg: TrainConfig, target_model: TargetModel, precision: Precision) -> None:
        self.cfg = cfg
        self.draft = MedusaDraft.from_target_model(
            target_model, cfg.medusa_num_heads, cfg.medusa_num_layers, dtype=torch.float32
        )
        self.student = build_target_model_recipe(cfg, target_model, precision)
        self.student.train()
        self.objective = Objective(
            self.draft,
            cfg.medusa_decay_coefficient,
            lm="kl" if self.student.joint else None,
            heads_coefficient=cfg.medusa_heads_coefficient,
        )
        trained = self.student.parameters.values()
        self.parameters = [*self.draft.parameters(), *trained]
        groups = parameter_groups(
            self.draft.parameters(),
            cfg.heads_learning_rate,
            trained,
            cfg.learning_rate,
            cfg.weight_decay,
        )
        self.optimizer = build_optimizer(cfg.optimizer, groups, precision.device)[0]

    def __call__(self, batch: Batch, accumulation: int = 1) -> float:
        """Accumulate the gradients of `batch` `accumulation` times, update the weights, and return
        the last loss.
        """
        for _ in range(accumulation):
            loss = self.micro_batch(batch)
        self.update()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)

    def update(self) -> None:
        """Clip the gradients and update the weights."""
        torch.nn.utils.clip_grad_norm_(self.parameters, self.cfg.max_grad_norm)
        self.optimizer.step()

    def micro_batch(self, batch: Batch) -> Tensor:
        """Add the gradients of a micro-batch, and return its loss."""
        hidden_states = self.student.hidden_states(batch)
        teacher = (
            self.student.teacher(batch, hidden_states) if self.objective.needs_teacher else None
        )
        lm_head = self.student.target_model.lm_head() if self.student.joint else None
        cut, counts = GraphCut(), self.objective.target_counts(batch)
        hidden_states = replace(hidden_states, final=cut.detach(hidden_states.final))
        with self.student.precision.autocast():
            loss = self.objective.loss_and_gradients(
                hidden_states, batch, counts, lm_head=lm_head, teacher=teacher, grad_scale=1.0
            ).loss
        cut.backward()
        return loss


def shape_setup(case: Case, precision: Precision) -> tuple[TrainConfig, TargetModel, Batch]:
    """Create a model with random weights at the shape of a 7B model (a small shape without a GPU),
    and one micro-batch.
    """
    shape = SHAPES["7B"] if precision.device.type == "cuda" else SMALL_LLAMA
    config = llama_config(*shape)
    changes = [f"medusa_num_heads={case.heads}"]
    if case.method == "compiled":
        changes.append("torch_compile=true")
    if case.method == "unchecked":
        changes.append("gradient_checkpointing=false")
    cfg = configured(case.what, changes)
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab_size, (case.rows, case.tokens), device=precision.device)
    lengths = document_lengths(case.tokens) if case.method == "packed" else [case.tokens]
    positions = torch.cat([torch.arange(length) for length in lengths])  # [T]
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))  # [T]
    rows = [row.to(precision.device).expand_as(tokens) for row in (positions, segments)]
    model = random_model(config, precision.dtype, precision.device)
    if cfg.load_in_4bit:
        quantize_nf4(model)
    return cfg, TargetModel(model, None, "7B"), Batch(tokens, tokens, *rows, [])


def document_lengths(tokens: int) -> list[int]:
    """Divide a row of `tokens` tokens into documents by their shares `DOCUMENTS`."""
    lengths = [max(1, round(share * tokens)) for share in DOCUMENTS[:-1]]
    return [*lengths, tokens - sum(lengths)]


def measure_step(case: Case) -> Result:
    """Measure whole optimizer steps. Memory is measured only on a GPU."""
    # 1. create the model, and run a warm-up step, which also creates the optimizer states
    precision = device_and_precision(case)
    device, dtype = precision.device, precision.dtype
    rate = matrix_rate(device, dtype, 1.0, None if device.type == "cuda" else 512)
    cfg, target_model, batch = shape_setup(case, precision)
    attention = None
    if case.method == "packed":
        attention = choose_attention(target_model, "auto", packed=True)
    release_memory()
    weights = tensor_bytes(target_model.model.parameters())
    before = torch.cuda.memory_allocated()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = Step(cfg, target_model, precision)
    step(batch)
    # 2. time steps, and read their peak memory
    seconds, loss = repeated(lambda: step(batch, case.accumulation), case)
    states = (state for group in step.optimizer.state.values() for state in group.values())
    held = 2 * tensor_bytes(step.parameters) + tensor_bytes(states)  # with gradients
    peak = torch.cuda.max_memory_allocated() - before  # 0 without a GPU
    # 3. estimate memory as `--inspect` does, and count operations
    rows, width = batch.tokens.shape
    estimate = Estimate(cfg, target_model.config).memory(
        rows=rows, width=width, dtype=dtype, device=device.type
    )
    trained = sum(parameter.numel() for parameter in step.student.parameters.values())
    sizes = Sizes.of(target_model.config)
    tokens = rows * width * case.accumulation
    return Result(
        True,
        seconds,
        loss,
        tokens,
        max(0, peak - held),
        total=weights + peak,
        estimate=estimate.total,
        operations=tokens * needed_operations(sizes, cfg.medusa_num_heads, width, trained),
        rate=rate,
        attention=attention,
    )


def needed_operations(sizes: Sizes, heads: int, tokens: int, trained: int) -> int:
    """Return the operations per token that a recipe needs, without recomputing activations.

    A weight needs 2 operations in the forward pass, 2 for the gradient of its input, and 2 for its
    own gradient. A frozen target model below the heads runs only forward, without lm_head. A frozen
    matrix under an adapter does not need its own gradient.

    Args:
        tokens: length of a row; attention covers half of it on average.
        trained: number of the adapter's parameters; 0 without an adapter.
    """
    attention = 4 * sizes.layers * sizes.queries * tokens // 2
    head = 6 * sizes.head_weights(heads)
    if not trained:  # the heads' first blocks need no gradient of their input
        return 2 * sizes.body + attention + head - 2 * heads * sizes.hidden**2
    return 4 * (sizes.body + sizes.vocab * sizes.hidden) + 3 * attention + head + 6 * trained


def step_table(measured: Mapping[Case, Result]) -> str:
    """Format throughput, MFU and memory of whole steps."""
    rows = []
    for case, one in measured.items():
        rows_and_steps = f"{case.accumulation} x {case.rows} x {case.tokens:,}"
        first = [TITLES[case.what] + METHOD_TITLES.get(case.method, ""), rows_and_steps]
        if not one.fits:
            rows.append([*first, "does not fit", *[""] * 4])
            continue
        speed = one.tokens / one.median
        mfu = f"{one.operations / one.median / one.rate:.2f}"
        sizes = (one.peak, one.total, one.estimate)
        rows.append([*first, f"{speed:,.0f}", mfu, *(f"{size / 1e6:,.0f}" for size in sizes)])
    return table(["recipe", "rows", "tokens/s", "MFU", "MB", "all MB", "--inspect MB"], rows, 2)


def write_report(out: Path, machine: dict[str, Any], measured: Mapping[Case, Result]) -> None:
    """Write train.md and train.json."""
    defaults = asdict(Case("", "", dtype=""))
    cases = []
    for case, one in measured.items():
        settings = {key: value for key, value in asdict(case).items() if value != defaults[key]}
        figures: dict[str, Any] = {"fits": False}
        if one.fits:
            figures = {
                "seconds": round(one.median, 4),
                "runs": len(one.seconds),
                "loss": round(one.loss, 5),
                "peak_mb": round(one.peak / 1e6),
                "total_mb": round(one.total / 1e6),
                "estimate_mb": round(one.estimate / 1e6),
                "tokens_counted": one.tokens,
                "tokens_per_s": round(one.tokens / one.median),
                "mfu": round(one.operations / one.median / one.rate, 4),
            }
            if one.attention is not None:
                figures["attention"] = one.attention
        cases.append({**settings, **figures})
    note = (
        "Whole steps. MB: beyond parameters, gradients and optimizer. MFU: operations that the"
        " recipe needs over the measured matrix rate."
    )
    note += stand_in_note(machine)
    kernels = [f"Packed rows: {one.attention}." for one in measured.values() if one.attention]
    parts = [" ".join([note, *dict.fromkeys(kernels)]), step_table(measured)]
    write_page(out, "train", "Cost of training", {"machine": machine, "cases": cases}, parts)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, "runs/benchmarks/train")
    parser.add_argument("--quick", action="store_true", help="one length of rows, one round")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["shape7b"])
    parser.add_argument(
        "--sequences",
        nargs="+",
        type=int,
        metavar="T",
        help="tokens of a row: 2048 4096; 64 on a CPU",
    )
    parser.add_argument("--rows", type=int, default=2, help="of a micro-batch (2)")
    parser.add_argument(
        "--rounds", type=int, help="processes per case, in turns; the fastest counts (2)"
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="per process, after which no further one begins"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)  # measure this case in this process
    args = parser.parse_args(arguments)
    lengths = [2048, 4096] if torch.cuda.is_available() else [64, 128]
    args.sequences = args.sequences or lengths[: 1 if args.quick else 2]
    args.rounds = args.rounds or (1 if args.quick else 2)
    return args


def cases_of(args: argparse.Namespace) -> list[Case]:
    """List the cases of the chosen parts."""
    named = set(args.parts)
    if "shape7b" in named:
        named |= {"medusa1_7b", "medusa2_7b"}
    steps = [step for part, step in STEPS.items() if part in named]
    if not find_spec("bitsandbytes") and any(what == "shape2" for what, _ in steps):
        print("skipping QLoRA, bitsandbytes is not installed", flush=True)
        steps = [step for step in steps if step[0] != "shape2"]
    cases = []
    for (what, method), tokens in itertools.product(steps, args.sequences):
        accumulation = (
            configured(what).gradient_accumulation_steps if torch.cuda.is_available() else 2
        )
        case = Case(what, method, tokens=tokens, rows=args.rows, seconds=args.seconds)
        cases.append(replace(case, accumulation=accumulation))
    return cases


def configured(what: str, changes: Sequence[str] = ()) -> TrainConfig:
    """Return the configuration of a recipe with the overrides `changes` (`key=value`)."""
    return load_config(TrainConfig, ROOT / "configs" / CONFIGS[what], changes)


def measure_here(case: Case) -> Result:
    """Measure `case` in this process. On a CPU it may use at most 90 % of the free memory."""
    free = free_memory(torch.device("cpu"))
    # with the limit, an allocation fails before the system kills a process
    if free is not None and not torch.cuda.is_available():
        resource.setrlimit(resource.RLIMIT_DATA, (int(0.9 * free),) * 2)
    try:
        return measure_step(case)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return Result(False, [])


def measure_in_process(case: Case) -> Result:
    """Measure `case` in a new process. If the process is killed, the case does not fit.

    Raises:
        RuntimeError: the process failed for another reason, which it printed.
    """
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == -9:
        return Result(False, [])
    if done.returncode != 0:
        raise RuntimeError(f"case failed with exit code {done.returncode}: {case}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure everything that was asked for, and write the result."""
    quiet_libraries()
    args = parse_arguments(arguments)
    if args.case:
        print(json.dumps(asdict(measure_here(Case(**json.loads(args.case))))))
        return
    machine = machine_facts(__file__, arguments)
    warn_if_busy()
    measured: dict[Case, Result] = {}
    failed: list[str] = []
    for case in cases_of(args):
        for _ in range(args.rounds):
            try:
                result = measure_in_process(case)
            except RuntimeError as error:
                failed.append(str(error))  # the next cases do not depend on this one
                continue
            if case not in measured or result.median < measured[case].median:
                measured[case] = result
        if case not in measured:
            continue
        one = measured[case]
        cost = f"{one.median:.2f} s {one.peak / 1e6:,.0f} MB" if one.fits else "does not fit"
        print(f"{case.what} {case.method} T {case.tokens}: {cost}", flush=True)
        write_report(args.out, machine, measured)
    print(f"wrote {args.out}/train.md, train.json")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
