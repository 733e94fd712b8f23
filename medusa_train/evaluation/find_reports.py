"""Find the reports of finished evaluations, without importing torch, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from medusa_train.config.paths import resolve_path
from medusa_train.errors import CheckpointError, ConfigError


def find_reports(names: Sequence[str], bench: str | None) -> list[Path]:
    """Return the paths of the report.json files of two or more runs, directories or files.

    Args:
        bench: which evaluation of a run to choose; default: the newest.
    """
    if len(names) < 2:
        raise ConfigError("--compare needs two runs or more: medusa-eval --compare runs/a runs/b")
    return [_find(name, bench) for name in names]


def _find(name: str, bench: str | None) -> Path:
    """Return the report.json that a name on the command line means."""
    path = resolve_path(name)
    if path is None:
        raise CheckpointError(f"{name}: no such run or report")
    if path.is_file():
        return path
    if (path / "report.json").is_file():
        return path / "report.json"
    reports = sorted(path.glob("eval/*/report.json"), key=lambda file: file.stat().st_mtime)
    if bench is not None:
        reports = [file for file in reports if file.parent.name == bench]
    if not reports:
        on_bench = "" if bench is None else f" on bench {bench}"
        raise CheckpointError(
            f"{name}: holds no evaluation{on_bench} yet; run medusa-eval --model {name} first"
        )
    return reports[-1]
