"""The Python API: what was trained, ready to answer. Thin: finding and decoding are done below."""

from __future__ import annotations

from pathlib import Path

import torch

from medusa_train.checkpoint.load import ModelPaths, load_with_draft, resolve_model
from medusa_train.inference.model import Model
from medusa_train.models.precision import has_fast_bf16


def load(
    model: str | Path | None = None,
    *,
    base_model: str | Path | None = None,
    tree: str | Path | None = None,
    dtype: str = "auto",
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    compile: bool = False,
) -> Model:
    """Load a trained model, or a backbone alone.

    Args:
        model: a run directory, or a directory of heads; by default the newest run under runs/.
        base_model: the backbone, a directory or a name on the hub; by default the one that was trained with. Without
            `model` it decodes plainly, without heads.
        tree: a tree file; by default the one beside the heads.
        dtype: float32, bfloat16 or float16; auto: bfloat16 where the device multiplies it well, else float32.
        chat_template: by name; by default the run's, else the tokenizer's own.
        trust_remote_code: run Python code that the backbone's repository ships.
        compile: compile the decoding passes with torch.compile: up to a minute more to start, faster steps.

    Raises:
        CheckpointError: no such run or heads, or files that can't be read.
        BackboneError: the backbone can't be found or loaded.
    """
    paths = resolve_model(
        None if model is None else str(model),
        None if base_model is None else str(base_model),
        None if tree is None else Path(tree),
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
    )
    return open_model(paths, dtype, compiled=compile)


def open_model(paths: ModelPaths, dtype: str, *, compiled: bool = False) -> Model:
    """Load what `resolve_model` has found; raises as `load` does."""
    if dtype == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = "bfloat16" if has_fast_bf16(device) else "float32"
    subject = load_with_draft(paths, dtype, compiled=compiled)
    return Model(subject.backbone, subject.draft, subject.tree, paths.chat_template)
