"""The journey of `medusa-eval --calibrate`: prompts and model in, tree.json and a page out. Holds no arithmetic."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from medusa_train.checkpoint.subject import SubjectPaths, load_subject
from medusa_train.config.schema import EvalConfig
from medusa_train.data.chat import ChatEncoder
from medusa_train.errors import CheckpointError
from medusa_train.evaluation.benches import Bench
from medusa_train.evaluation.calibration import collect, save, search, table, talks_of_bench, talks_of_run
from medusa_train.evaluation.fastest import choose_dtype
from medusa_train.evaluation.progress import TurnProgress
from medusa_train.tracking import standing
from medusa_train.trees.tree import Tree

TREE = "tree.json"


def calibrate(cfg: EvalConfig, bench: Bench, paths: SubjectPaths, console: Console) -> list[Path]:
    """Choose the tree anew on this machine; returns the files that were written.

    tree.json goes to the run (or `output_dir`), the page and all figures to eval/calibration beside it.

    Raises:
        CheckpointError: there are no heads, or too few prompts. BackboneError: the backbone can't be used.
    """
    if paths.heads is None:
        raise CheckpointError("--calibrate chooses a tree for heads; name them with --model")
    dtype = cfg.dtype if cfg.dtype != "auto" else choose_dtype(bench, paths, console)
    with standing(console, f"loading and laying out in {dtype}"):
        subject = load_subject(paths, dtype, compiled=cfg.compile)
    chat = ChatEncoder(subject.backbone.tokenizer, paths.chat_template)
    talks = talks_of_run(paths, chat, cfg.seed)
    kind = "prompts that the run held out"
    if talks is None:
        talks = talks_of_bench(bench.questions, chat)
        kind = f"questions of bench {bench.name}: measure on another one"
    console.print(f"calibrating on {cfg.calibration_tokens:,} greedy tokens, {kind}", highlight=False, soft_wrap=True)
    with TurnProgress(console, f"answering in {dtype}", sum(len(prompts) for prompts in talks)) as progress:
        traced = collect(subject, talks, cfg.calibration_tokens, cfg.max_new_tokens, progress.advance)
    console.print("comparing trees of 0 to 63 nodes, then timing steps", highlight=False)
    own = None if cfg.tree is None or paths.tree is None else Tree.load(paths.tree)
    found = search(subject, traced, [prompt for prompts in talks for prompt in prompts], own)
    console.print(table(found))
    console.print(
        f"{found.nodes} nodes: {found.curves['joint'][found.nodes]:.2f} tokens per step expected, "
        f"{found.step_ms(found.nodes):.2f} ms per step in {dtype}",
        highlight=False,
    )
    home = Path(cfg.output_dir) if cfg.output_dir else paths.home
    return save(found, home / TREE, home / "eval" / "calibration", f"Calibration of {paths.home.name}")
