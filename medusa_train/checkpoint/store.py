"""Save and load training checkpoints atomically and with checksums, and delete old ones. Their
content is defined in training/snapshot.py.

OUTPUT_DIR/checkpoints/step-N/manifest.json       format, step, size and CRC-32 of each other file
                              state.json          the state without tensors
                              PART.safetensors    the tensors of one part of the state
                       best-N/                    the same files for the best weights alone
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from medusa_train.checkpoint.run_directory import CHECKPOINTS
from medusa_train.checkpoint.serialize import (
    join_tensors,
    read_json,
    read_tensors,
    split_tensors,
    write_json,
    write_tensors,
)
from medusa_train.checksums import checksum
from medusa_train.errors import CheckpointError
from medusa_train.io import WRITE_ERRORS, sync, write_failure

MANIFEST = "manifest.json"
STATE = "state.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d+)")
#: Parts of a run's state with trained weights: those of the heads, and of a trained target model.
WEIGHTS = ("draft", "student")


class CheckpointStore:
    """The checkpoints of one run, under OUTPUT_DIR/checkpoints.

    Files are written to `.tmp-step-N` or `.tmp-best-N`, flushed to disk and then renamed. So a
    `step-N` directory is always complete, even after a crash of the process or the machine.

    Args:
        output_dir: the run directory.
        save_total_limit: number of newest checkpoints to keep; None or 0 keeps all.
    """

    def __init__(self, output_dir: Path | str, save_total_limit: int | None = None) -> None:
        self.root = Path(output_dir) / CHECKPOINTS
        self.limit = save_total_limit or None

    def save(self, step: int, state: Mapping[str, Any], best: int | None = None) -> Path:
        """Save the state after `step` optimizer steps, then delete the oldest checkpoints beyond
        the limit.

        Args:
            state: part -> nested dicts, lists, tuples, tensors and plain values (see
                `split_tensors`).
            best: step of the best evaluation, whose weights are kept until another one is better.
                If it is `step`, the weights are also saved as `best-STEP`, which takes no extra
                space if the file system has hard links.

        Raises:
            CheckpointError: writing failed (disk full, no permission); earlier checkpoints are
                unchanged.
            TypeError: the state holds something that cannot be saved without pickle.
        """
        # 1. Save the state, and its weights again if they are the best.
        path = self._save(f"step-{step}", step, state, f"the checkpoint of step {step}")
        if best == step:
            weights = {name: part for name, part in state.items() if name in WEIGHTS}
            self.save_best(step, weights, linked=path)
        if best is not None:
            self._delete_best({best})
        # 2. Delete the oldest checkpoints, except one that has the only copy of the best weights.
        if self.limit:
            keep = {step}
            if best is not None and self.best(best) == self.at(best):
                keep.add(best)
            for old in self.steps()[: -self.limit]:
                if old not in keep:
                    _delete(self.root / f"step-{old}")
        return path

    def save_best(
        self,
        step: int,
        weights: Mapping[str, Any],
        keep: Collection[int] = (),
        linked: Path | None = None,
    ) -> Path:
        """Save the weights of the best evaluation so far as `best-STEP`, then delete earlier best
        weights.

        Args:
            step: the step after which the evaluation took place.
            weights: the parts `WEIGHTS` of a state.
            keep: steps of earlier best weights to keep: those that the latest checkpoint needs for
                resuming.
            linked: a checkpoint with the same weights; its files are linked instead of being
                written again.
        """
        path = self._save(
            f"best-{step}", step, weights, f"the best weights, of step {step},", linked
        )
        self._delete_best({step, *keep})
        return path

    def _save(
        self, name: str, step: int, state: Mapping[str, Any], what: str, linked: Path | None = None
    ) -> Path:
        parts = {part: split_tensors(value) for part, value in state.items()}
        temporary = self.root / f".tmp-{name}"
        try:
            self._restore_replaced()
            # delete incomplete files of a killed process
            for stale in self.root.glob(".tmp-*-*"):
                shutil.rmtree(stale)
            temporary.mkdir(parents=True)
            _write(temporary, step, parts, linked)
            self._publish(temporary, self.root / name)
        except WRITE_ERRORS as error:
            # delete the files before free space is measured for the message
            shutil.rmtree(temporary, ignore_errors=True)
            num_bytes = 0
            for tensors, _ in parts.values():
                num_bytes += sum(tensor.nbytes for tensor in tensors.values())
            reason = write_failure(what, self.root, error, num_bytes)
            latest = self.latest()
            earlier = f"The last good one is {latest}." if latest else "There is no earlier one."
            raise CheckpointError(f"{reason}\n{earlier}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return self.root / name

    def steps(self) -> list[int]:
        """List the steps of complete checkpoints in ascending order."""
        self._restore_replaced()
        names = [path.parent.name for path in self.root.glob(f"step-*/{MANIFEST}")]
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def latest(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        steps = self.steps()
        return self.at(steps[-1]) if steps else None

    def at(self, step: int) -> Path | None:
        """Return the checkpoint of `step`, or None."""
        return self._complete(f"step-{step}")

    def best(self, step: int) -> Path | None:
        """Return the path of the best evaluation's weights, measured after `step`; None if there is
        none.

        If the run was killed before it saved them as `best-STEP`, they are only in the checkpoint.
        """
        return self._complete(f"best-{step}") or self.at(step)

    def _complete(self, name: str) -> Path | None:
        self._restore_replaced()
        path = self.root / name
        return path if (path / MANIFEST).is_file() else None

    def load(
        self, path: Path | str, *, verify: bool = True, parts: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Load a saved state, with tensors on the CPU.

        Tensors are memory-mapped: unused parts of them are not read from disk.

        Args:
            verify: whether to read every file and compare its checksum. False compares only sizes;
                it is for processes that run in parallel with one that verifies.
            parts: load only these parts of the state; None: all parts.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        path = Path(path)
        try:
            if not (path / MANIFEST).is_file():
                raise CheckpointError(f"{path}: not a checkpoint (no {MANIFEST} in it)")
            return _read(path, verify, parts)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{self._others(path)}") from error

    def _publish(self, temporary: Path, final: Path) -> None:
        """Rename a complete checkpoint to its final name; it replaces an earlier one."""
        old = self.root / f".old-{final.name}"
        # a directory cannot replace a non-empty one; after a crash _restore_replaced undoes the
        # move
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        sync(self.root)
        shutil.rmtree(old, ignore_errors=True)

    def _restore_replaced(self) -> None:
        """Restore checkpoints that a killed process moved away but had not replaced yet."""
        for path in self.root.glob(".old-*-*"):
            final = self.root / path.name.removeprefix(".old-")
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(final)

    def _delete_best(self, keep: Collection[int]) -> None:
        kept_names = {f"best-{step}" for step in keep}
        for path in self.root.glob("best-*"):
            if path.name not in kept_names:
                _delete(path)

    def _others(self, path: Path) -> str:
        """Say what to do in place of loading `path`, for messages."""
        names = [f"step-{step}" for step in self.steps()]
        other_names = ", ".join(name for name in names if self.root / name != path)
        if not other_names:
            return (
                f"\nThere is no other checkpoint in {self.root}: copy this one again, or start a"
                " new run"
            )
        return (
            f"\nOther checkpoints in {self.root}: {other_names};"
            " resume_from_checkpoint=PATH resumes from one"
        )


def _write(
    directory: Path,
    step: int,
    parts: Mapping[str, tuple[dict[str, Tensor], Any]],
    linked: Path | None,
) -> None:
    """Write a checkpoint's files. If `linked` is given, tensor files are links to its files."""
    # 1. Write the plain values of all parts.
    values = {part: value for part, (_, value) in parts.items()}
    checksums = {STATE: write_json(directory / STATE, values)}
    # 2. Write the tensors of each part.
    for part, (tensors, _) in parts.items():
        name = f"{part}.safetensors"
        if tensors and linked is not None:
            _link_or_copy(linked / name, directory / name)
            checksums[name] = _read_manifest(linked / MANIFEST)["files"][name]["crc32"]
        elif tensors:
            checksums[name] = write_tensors(directory / name, tensors)
    # 3. Write the manifest, which makes the checkpoint complete.
    files = {}
    for name in sorted(checksums):
        size = (directory / name).stat().st_size
        files[name] = {"bytes": size, "crc32": checksums[name]}
    manifest = {"format": _FORMAT, "step": step, "files": files}
    write_json(directory / MANIFEST, {**manifest, "crc32": _crc(manifest)})
    sync(directory)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copyfile(source, target)
        sync(target)


def _delete(path: Path) -> None:
    (path / MANIFEST).unlink(missing_ok=True)  # so that a partly deleted checkpoint does not count
    shutil.rmtree(path, ignore_errors=True)


def _crc(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest, and check its format and its own checksum."""
    manifest = read_json(path)
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise CheckpointError(f"{path}: not a checkpoint manifest")
    if manifest["format"] != _FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest['format']!r}; this version of medusa-train reads {_FORMAT}"
        )
    if manifest.pop("crc32", None) != _crc(manifest):
        raise CheckpointError(f"{path}: damaged: checksum mismatch")
    return manifest


def _read(path: Path, verify: bool, parts: Collection[str] | None) -> dict[str, Any]:
    """Read the parts of a state; with `verify`, compare the checksums of their tensor files."""
    files = _read_manifest(path / MANIFEST)["files"]
    _verify(path / STATE, files[STATE])
    state = {}
    for name, value in read_json(path / STATE).items():
        if parts is not None and name not in parts:
            continue
        tensors: dict[str, Tensor] = {}
        file = f"{name}.safetensors"
        if file in files:
            _verify(path / file, files[file], checksums=verify)
            tensors = read_tensors(path / file)
        state[name] = join_tensors(tensors, value)
    return state


def _verify(path: Path, expected: Mapping[str, int], *, checksums: bool = True) -> None:
    """Raise CheckpointError unless a file has the manifest's size and, if asked, its checksum."""
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; the checkpoint is incomplete")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointError(
            f"{path}: truncated or changed, {size} bytes instead of {expected['bytes']}"
        )
    if checksums and checksum(path) != expected["crc32"]:
        raise CheckpointError(f"{path}: damaged: checksum mismatch")
