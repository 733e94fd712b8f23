"""What a finished run leaves behind: heads, a tree fitted to them, and a page that says so. Knows no training loop."""

from __future__ import annotations

import random
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from medusa_train.checkpoint.drafts import save_draft
from medusa_train.data.dataset import EncodedDataset
from medusa_train.errors import MedusaError
from medusa_train.inference.calibrate import Calibration, calibrate
from medusa_train.models.drafts.base import Draft
from medusa_train.tracking import duration, standing
from medusa_train.training.heldout import HeldOut
from medusa_train.training.run_dir import HEADS, TREE
from medusa_train.training.state import TrainState
from medusa_train.training.student import Student

ANSWER = 256  # longest calibration answer in tokens; shorter where the budget would not do for eight of them


def publish_heads(draft: Draft, dtype: torch.dtype, out: Path, base_model: str) -> Path:
    """Write heads/, in the dtype that the run computed in; `draft` is converted to it.

    The float32 masters stay in the last checkpoint.
    """
    return save_draft(draft.to(dtype), out / HEADS, base_model)


def calibration_prompts(conversations: EncodedDataset, token_budget: int, seed: int) -> list[list[int]]:
    """Places in the conversations where an answer begins, as the tokens before it, in random order.

    Earlier turns keep the answers of the data as history; only what comes next is the backbone's own. Enough are
    taken for `token_budget` tokens even where the backbone answers in a quarter of the data's words.
    """
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    room = 4 * token_budget
    for example in draw.sample(list(conversations), len(conversations)):
        prompts.extend(example.prompts())
        room -= int(example.supervised.sum())
        if room <= 0:
            break
    draw.shuffle(prompts)
    return prompts


def fit_tree(
    student: Student,
    draft: Draft,
    prompts: Sequence[list[int]],
    token_budget: int,
    out: Path,
    console: Console,
) -> Calibration | None:
    """Choose the tree on the backbone's own greedy answers to `prompts` and write tree.json.

    An adapter is folded in first, as for decoding, unless the backbone is quantised: dequantised it may not fit.

    Returns:
        What was found, or None, with a line that says why: the heads are of use without a tree too.
    """
    student.train(False)
    draft.eval()
    if student.adapter is not None and not getattr(student.backbone.model, "is_quantized", False):
        student.adapter.merge()
    with standing(console, "prepacking weights for decoding"):  # as medusa-eval does
        student.backbone.pack()
        draft.pack()
    progress = Progress(
        TextColumn("[bold]tree "),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} greedy tokens, left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    if not console.is_terminal:
        console.print(f"choosing the tree on {token_budget:,} greedy tokens of held-out prompts", highlight=False)
    try:
        with progress:
            task = progress.add_task("tree", total=token_budget)
            found = calibrate(
                student.backbone,
                draft,
                prompts,
                max_new_tokens=min(ANSWER, max(8, token_budget // 8)),
                token_budget=token_budget,
                on_answer=lambda tokens: progress.advance(task, tokens),
            )
    except MedusaError as reason:
        console.print(f"no tree was made: {reason}", style="yellow", markup=False)
        return None
    found.save(out / TREE)
    return found


def heads_table(held_out: HeldOut | None, calibration: Calibration | None) -> Table | None:
    """Top-1 and top-5 accuracy of every head, on held-out text and on the backbone's own continuations."""
    if held_out is None and calibration is None:
        return None
    table = Table(title="head accuracy", title_justify="left")
    table.add_column("head", justify="right")
    rows: list[list[str]] = []
    if held_out is not None:
        _add_columns(table, rows, "held-out text", held_out.top)
    if calibration is not None:
        _add_columns(table, rows, "greedy continuations", calibration.accuracy)
    for k, row in enumerate(rows, start=1):
        table.add_row(str(k), *row)
    return table


def _add_columns(table: Table, rows: list[list[str]], name: str, top: Sequence[Sequence[float]]) -> None:
    for rank in (1, 5):
        table.add_column(f"{name}\ntop-{rank}", justify="right")
    rows.extend([] for _ in range(len(top) - len(rows)))
    for row, shares in zip(rows, top, strict=True):
        row.extend([f"{shares[0]:.3f}", f"{shares[4]:.3f}"])


def summary(
    what: str,
    state: TrainState,
    step: int,
    held_out: HeldOut | None,
    calibration: Calibration | None,
    out: Path,
    warning: str = "",
) -> Table:
    """Say what was trained, how long it took, what was saved (as of `step`), and which command comes next."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("trained", Text(what))
    speed = state.tokens / state.seconds if state.seconds else 0.0
    skipped = f", {state.skipped} of them skipped" if state.skipped else ""
    table.add_row(
        "run",
        f"{state.step:,} steps{skipped}, {state.epoch:.2f} epochs, {state.tokens:,} tokens, "
        f"{duration(state.seconds)} ({speed:,.0f} tokens/s)",
    )
    if held_out is not None:
        best = f" (lowest {state.best_loss:.4f} at step {state.best_step})" if state.best_step != step else ""
        saved = f", as of step {step}" if step != state.step else ""
        whole = "held-out loss" if held_out.lm_loss is None else "held-out objective (backbone + lambda0 x heads)"
        table.add_row(whole, f"{held_out.objective:.4f}{saved}{best}")
        if held_out.acceptance is not None:
            table.add_row(
                "acceptance length",
                f"{held_out.acceptance.length:.2f} tokens per step on held-out text, with a tree of "
                f"{held_out.acceptance.tree.size} nodes",
            )
    if calibration is not None:
        tree = calibration.best
        table.add_row(
            "tree",
            f"{tree.tree.size} nodes: {tree.tokens_per_step:.2f} tokens per step expected, {tree.step_ms:.1f} ms per "
            f"step here (from {calibration.tokens:,} greedy tokens)",
        )
    if warning:
        table.add_row("note", warning)
    kept = [name for name in (HEADS, TREE, "config.yaml", "metrics.jsonl") if (out / name).exists()]
    table.add_row("saved", Text(f"{out} ({', '.join(kept)})"))
    table.add_row("next", Text(shlex.join(["medusa-eval", "--bench", "tiny", "--model", str(out)]), style="bold"))
    return table
