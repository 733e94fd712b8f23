"""Checkpoints of a run, each written whole or not at all. Knows nothing of models, optimizers or what a state means.

OUTPUT_DIR/checkpoints/step-N/manifest.json       format, step, size and CRC-32 of every other file
                              state.json          the state without its tensors
                              PART.safetensors    the tensors of each top-level entry
                              NAME                JSON for other readers, not part of the state (a run's tree.json)
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

from medusa_train.checkpoint.serialize import checksum, pack, read_json, read_tensors, unpack, write_json, write_tensors
from medusa_train.errors import CheckpointError
from medusa_train.io import WRITE_ERRORS, sync, write_failure

MANIFEST = "manifest.json"
STATE = "state.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d+)")


class CheckpointStore:
    """Saves and finds the checkpoints of one run.

    A checkpoint is filled in a temporary directory beside the others, flushed to the disk and renamed, so that a
    `step-N` that can be seen is whole, whenever the process or the machine dies.
    """

    def __init__(self, output_dir: Path | str, save_total_limit: int | None = None) -> None:
        """Keep the newest `save_total_limit` checkpoints (None or 0: all) under `output_dir`/checkpoints."""
        self.root = Path(output_dir) / "checkpoints"
        self.limit = save_total_limit or None

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        keep: Collection[int] = (),
        beside: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write the state after `step` optimizer steps; then drop the oldest checkpoints beyond the limit.

        Args:
            step: names the checkpoint; one that is there already is replaced.
            state: part -> nested dicts, lists, tuples, tensors and plain values (see `pack`), for instance
                `{"draft": draft.state_dict(), "engine": engine.state_dict(), "rng": rng_state(), "run": {...}}`.
            keep: steps whose checkpoints stay beside those that the limit allows.
            beside: file name -> JSON value, written into the checkpoint for other readers; `load` leaves it out.

        Raises:
            CheckpointError: it could not be written (disk full, no permission); earlier ones are as they were.
            TypeError: the state holds something that can't be saved without pickle.
        """
        parts = {name: pack(value) for name, value in state.items()}
        final = self.root / f"step-{step}"
        temporary = self.root / f".tmp-step-{step}"
        try:
            self._put_back()
            for left in self.root.glob(".tmp-step-*"):  # of a process that was killed
                shutil.rmtree(left)
            temporary.mkdir(parents=True)
            _fill(temporary, step, parts, beside or {})
            self._publish(temporary, final)
        except WRITE_ERRORS as error:
            shutil.rmtree(temporary, ignore_errors=True)  # before the disk is asked how much of it is free
            needed = sum(tensor.nbytes for tensors, _ in parts.values() for tensor in tensors.values())
            reason = write_failure(f"the checkpoint of step {step}", self.root, error, needed)
            raise CheckpointError(f"{reason}\n{self._last_good()}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._retain({step, *keep})
        return final

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, in order; unfinished directories don't count."""
        if not self.root.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.root.iterdir() if (path / MANIFEST).is_file())
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> Path | None:
        """The checkpoint of the last step, or None."""
        self._put_back()
        steps = self.steps()
        return self.root / f"step-{steps[-1]}" if steps else None

    def at(self, step: int) -> Path | None:
        """The checkpoint of that step, or None."""
        self._put_back()
        return self.root / f"step-{step}" if step in self.steps() else None

    def load(self, path: Path | str) -> dict[str, Any]:
        """The state that `save` was given, its tensors on the CPU.

        Raises:
            CheckpointError: `path` is no checkpoint, or a file of it is missing or damaged; names the file, and the
                checkpoints that could be used instead.
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
        if final.exists():  # a directory can't be renamed onto a full one; _put_back restores it if we die here
            final.rename(old)
        temporary.rename(final)
        sync(self.root)
        shutil.rmtree(old, ignore_errors=True)

    def _put_back(self) -> None:
        """Restore a checkpoint that was moved aside by a process killed before it could publish the new one."""
        for path in self.root.glob(".old-step-*"):
            final = self.root / path.name.removeprefix(".old-")
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(final)

    def _retain(self, kept: Collection[int]) -> None:
        if self.limit is None:
            return
        for step in self.steps()[: -self.limit]:
            path = self.root / f"step-{step}"
            if step not in kept:
                (path / MANIFEST).unlink(missing_ok=True)  # from here on it doesn't count, however far we get
                shutil.rmtree(path, ignore_errors=True)

    def _last_good(self) -> str:
        steps = self.steps()
        return (
            f"The last good checkpoint is {self.root / f'step-{steps[-1]}'}." if steps else "There is no earlier one."
        )

    def _others(self, path: Path) -> str:
        others = [f"step-{step}" for step in self.steps() if self.root / f"step-{step}" != path]
        return f"\nOther checkpoints in {self.root}: {', '.join(others)}" if others else ""


def _fill(
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
        raise CheckpointError(f"{path}: not the manifest of a checkpoint")
    if manifest["format"] != _FORMAT:
        raise CheckpointError(f"{path}: format {manifest['format']!r}, this version reads {_FORMAT}")
    if manifest.pop("crc32", None) != _crc(manifest):
        raise CheckpointError(f"{path}: damaged, its checksum is not the one it was saved with")
    return manifest


def _read(path: Path) -> dict[str, Any]:
    manifest = _read_manifest(path / MANIFEST)
    for name, facts in manifest["files"].items():
        _verify(path / name, facts)
    parts = read_json(path / STATE)
    state = {}
    for name, value in parts.items():
        file = f"{name}.safetensors"
        state[name] = unpack(read_tensors(path / file) if file in manifest["files"] else {}, value)
    return state


def _verify(path: Path, facts: Mapping[str, int]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; the checkpoint can't be used")
    size = path.stat().st_size
    if size != facts["bytes"]:
        raise CheckpointError(f"{path}: truncated or changed, {size} bytes instead of {facts['bytes']}")
    if checksum(path) != facts["crc32"]:
        raise CheckpointError(f"{path}: damaged, its checksum is not the one it was saved with")
