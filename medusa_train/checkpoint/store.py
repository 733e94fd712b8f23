"""Save and load training checkpoints: atomic directories with checksums, and retention of the newest ones.

OUTPUT_DIR/checkpoints/step-N/manifest.json       format, step, size and CRC-32 of each other file
                              state.json          the state without tensors
                              PART.safetensors    the tensors of each top-level entry
                              NAME                JSON for other programs, not part of the state (the run's tree.json)
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from medusa_train.checkpoint.serialize import (
    checksum,
    join_tensors,
    read_json,
    read_tensors,
    split_tensors,
    write_json,
    write_tensors,
)
from medusa_train.errors import CheckpointError
from medusa_train.io import WRITE_ERRORS, sync, write_failure

MANIFEST = "manifest.json"
STATE = "state.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d+)")


class CheckpointStore:
    """The checkpoints of one run, under OUTPUT_DIR/checkpoints.

    A checkpoint is written to a temporary directory, flushed to disk and renamed, so that every `step-N` directory is
    complete even after a crash of the process or the machine.

    Args:
        output_dir: the run directory.
        save_total_limit: number of newest checkpoints to keep; None or 0 keeps all.
    """

    def __init__(self, output_dir: Path | str, save_total_limit: int | None = None) -> None:
        self.root = Path(output_dir) / "checkpoints"
        self.limit = save_total_limit or None

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        keep: Collection[int] = (),
        beside: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save the state after `step` optimizer steps, then delete the oldest checkpoints beyond the limit.

        Args:
            step: names the checkpoint; an existing one is replaced.
            state: by part, nested dicts, lists, tuples, tensors and plain values (see `split_tensors`), for instance
                `{"draft": draft.state_dict(), "engine": engine.state_dict(), "rng": rng_state(), "run": {...}}`.
            keep: steps of checkpoints to keep in addition to the limit.
            beside: by file name, JSON values to write into the checkpoint for other programs; `load` ignores them.

        Raises:
            CheckpointError: writing failed (disk full, no permission); earlier checkpoints are unchanged.
            TypeError: the state holds something that cannot be saved without pickle.
        """
        parts = {name: split_tensors(value) for name, value in state.items()}
        final = self.root / f"step-{step}"
        temporary = self.root / f".tmp-step-{step}"
        try:
            self._restore_replaced()
            for stale in self.root.glob(".tmp-step-*"):  # of a killed process
                shutil.rmtree(stale)
            temporary.mkdir(parents=True)
            _write(temporary, step, parts, beside or {})
            self._publish(temporary, final)
        except WRITE_ERRORS as error:
            shutil.rmtree(temporary, ignore_errors=True)  # before free space is measured for the message
            needed = sum(tensor.nbytes for tensors, _ in parts.values() for tensor in tensors.values())
            reason = write_failure(f"the checkpoint of step {step}", self.root, error, needed)
            raise CheckpointError(f"{reason}\n{self._last_good()}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._delete_old({step, *keep})
        return final

    def steps(self) -> list[int]:
        """List the steps of complete checkpoints in ascending order."""
        if not self.root.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.root.iterdir() if (path / MANIFEST).is_file())
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        self._restore_replaced()
        steps = self.steps()
        return self.root / f"step-{steps[-1]}" if steps else None

    def at(self, step: int) -> Path | None:
        """Return the checkpoint of `step`, or None."""
        self._restore_replaced()
        return self.root / f"step-{step}" if step in self.steps() else None

    def load(self, path: Path | str) -> dict[str, Any]:
        """Load the state that `save` was given, with tensors on the CPU.

        Raises:
            CheckpointError: `path` is not a checkpoint, or a file is missing or damaged; the message names the file
                and other checkpoints of the run.
        """
        path = Path(path)
        if not (path / MANIFEST).is_file():
            raise CheckpointError(f"{path}: not a checkpoint (no {MANIFEST} in it){self._others(path)}")
        try:
            return _read(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{self._others(path)}") from error

    def _publish(self, temporary: Path, final: Path) -> None:
        old = self.root / f".old-{final.name}"
        if final.exists():  # a directory can't be renamed onto a full one; _restore_replaced undoes this after a crash
            final.rename(old)
        temporary.rename(final)
        sync(self.root)
        shutil.rmtree(old, ignore_errors=True)

    def _restore_replaced(self) -> None:
        """Restore checkpoints that a killed process moved aside before their replacement was in place."""
        for path in self.root.glob(".old-step-*"):
            final = self.root / path.name.removeprefix(".old-")
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(final)

    def _delete_old(self, keep: Collection[int]) -> None:
        if self.limit is None:
            return
        for step in self.steps()[: -self.limit]:
            path = self.root / f"step-{step}"
            if step not in keep:
                (path / MANIFEST).unlink(missing_ok=True)  # an incomplete deletion is not a checkpoint
                shutil.rmtree(path, ignore_errors=True)

    def _last_good(self) -> str:
        steps = self.steps()
        return (
            f"The last good checkpoint is {self.root / f'step-{steps[-1]}'}." if steps else "There is no earlier one."
        )

    def _others(self, path: Path) -> str:
        others = [f"step-{step}" for step in self.steps() if self.root / f"step-{step}" != path]
        return f"\nOther checkpoints in {self.root}: {', '.join(others)}" if others else ""


def _write(
    directory: Path, step: int, parts: Mapping[str, tuple[dict[str, Tensor], Any]], beside: Mapping[str, Any]
) -> None:
    for name, value in beside.items():
        write_json(directory / name, value)
    write_json(directory / STATE, {name: value for name, (_, value) in parts.items()})
    for name, (tensors, _) in parts.items():
        if tensors:
            write_tensors(directory / f"{name}.safetensors", tensors)
    files = {path.name: {"bytes": path.stat().st_size, "crc32": checksum(path)} for path in sorted(directory.iterdir())}
    manifest = {"format": _FORMAT, "step": step, "files": files}
    write_json(directory / MANIFEST, {**manifest, "crc32": _crc(manifest)})
    sync(directory)


def _crc(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path)
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise CheckpointError(f"{path}: not a checkpoint manifest")
    if manifest["format"] != _FORMAT:
        raise CheckpointError(f"{path}: format {manifest['format']!r}; this version of medusa-train reads {_FORMAT}")
    if manifest.pop("crc32", None) != _crc(manifest):
        raise CheckpointError(f"{path}: damaged: checksum mismatch")
    return manifest


def _read(path: Path) -> dict[str, Any]:
    manifest = _read_manifest(path / MANIFEST)
    for name, expected in manifest["files"].items():
        _verify(path / name, expected)
    parts = read_json(path / STATE)
    state = {}
    for name, value in parts.items():
        file = f"{name}.safetensors"
        state[name] = join_tensors(read_tensors(path / file) if file in manifest["files"] else {}, value)
    return state


def _verify(path: Path, expected: Mapping[str, int]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; the checkpoint is incomplete")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointError(f"{path}: truncated or changed, {size} bytes instead of {expected['bytes']}")
    if checksum(path) != expected["crc32"]:
        raise CheckpointError(f"{path}: damaged: checksum mismatch")
