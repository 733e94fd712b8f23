"""The directory of an export. Its files replace those of an earlier export when all are complete."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from medusa_train.checkpoint.heads import VLLM_WEIGHTS
from medusa_train.checkpoint.resolve import SAFETENSORS, ModelPaths, find_heads, holds_merged
from medusa_train.checkpoint.run_directory import CONFIG, HEADS, TREE
from medusa_train.config.types import ExportTarget
from medusa_train.errors import CheckpointError
from medusa_train.io import WRITE_ERRORS, make_readable, write_failure

CARD = "README.md"
#: The value of the key `to` for a target model with its adapter merged.
MERGED: ExportTarget = "merged"
#: The tree for TensorRT-LLM.
CHOICES = "medusa_choices.json"
#: Subdirectory of an export that has its files until all of them are complete.
UNFINISHED = ".unfinished-export"


@dataclass
class Export:
    """An export, while it is written and afterwards.

    Attributes:
        paths: the run or the heads that are exported.
        draft: directory of the draft in `paths`.
        to: the layout.
        target: directory of the export.
        target_model_name: target model to name in config.json.
        licence: licence to name on the card; None: the target model's.
        announce: is called with a line before anything large is written.
        facts: lines that describe the export.
        warnings: lines on what the target program will not do with it.
    """

    paths: ModelPaths
    draft: Path
    to: ExportTarget
    target: Path
    target_model_name: str
    licence: str | None = None
    announce: Callable[[str], object] = lambda line: None
    facts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def files(self) -> Path:
        """Directory to which the files are written first; it is on the same disk as `target`."""
        return self.target / UNFINISHED


@contextmanager
def published(export: Export) -> Iterator[None]:
    """At the end of the `with` block, move the files in `export.files` to `export.target`, where
    they replace those of the same name, and delete the weights and trees of an earlier export.

    If an export fails or is killed, the files of an earlier export stay unchanged.

    Raises:
        CheckpointError: a write failed; the message names the directory and the free space.
    """
    target, files = export.target, export.files
    absent = [path for path in (target, *target.parents) if not path.exists()]
    shutil.rmtree(files, ignore_errors=True)  # left by a process that was killed
    files.unlink(missing_ok=True)  # a file, if an earlier version left it
    try:
        files.mkdir(parents=True)
        yield
        make_readable(files)
        names = [path.name for path in files.iterdir()]
        for name in names:
            shutil.rmtree(target / name, ignore_errors=True)  # only directories; files are replaced
            (files / name).replace(target / name)
        # an earlier model may have had more shards, or a tree
        earlier = [*target.glob("model*.safetensors*"), target / TREE, target / CHOICES]
        for path in earlier:
            if path.name not in names:
                path.unlink(missing_ok=True)
    except WRITE_ERRORS as error:
        shutil.rmtree(files, ignore_errors=True)  # delete before free space is measured
        raise CheckpointError(write_failure("the export", target, error)) from error
    finally:
        shutil.rmtree(files, ignore_errors=True)
        for path in absent:
            with suppress(OSError):  # the directory is not empty, because it has the export
                path.rmdir()


def check_target(export: Export) -> None:
    """Raise CheckpointError if the export would overwrite other files than an earlier export."""
    target = export.target
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"output_dir: {target} is a file, not a directory")
    sources = (export.draft, export.paths.home, Path(export.paths.target_model))
    if target.resolve() in [path.resolve() for path in sources] or _holds_other_files(
        target, export.to
    ):
        raise CheckpointError(
            f"output_dir: {target} holds other files that would be overwritten; name a new"
            " directory"
        )


def _holds_other_files(target: Path, to: ExportTarget) -> bool:
    """Return whether a directory has other content than an earlier export of the same kind."""
    if not target.exists() or all(path.name == UNFINISHED for path in target.iterdir()):
        return False
    if to == MERGED:
        return not holds_merged(target)
    if find_heads(target).layout in (None, "model"):
        return True
    if target.name == HEADS and (target.parent / CONFIG).is_file():  # the heads of another run
        return True
    weights = VLLM_WEIGHTS if to in ("vllm", "sglang", "speculators") else SAFETENSORS
    # vLLM reads all safetensors files in a directory
    return any(path.name != weights for path in target.glob("*.safetensors"))
