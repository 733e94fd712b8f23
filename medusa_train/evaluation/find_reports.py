"""Find the reports of finished evaluations, without importing torch, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from medusa_train.config.paths import resolve_path
from medusa_train.errors import CheckpointError, ConfigError
from medusa_train.evaluation.questions import name_of_file


def find_reports(names: Sequence[str], bench: str | None) -> list[Path]:
    """Return the paths of the report.json files of two or more runs, directories or files.

    Args:
        bench: which evaluation of a run to choose, by the name of its directory or by its question
            file; default: the newest.
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
    if bench is None and reports:
        return reports[-1]
    if bench is None:
        raise CheckpointError(
            f"{name}: holds no evaluation yet; run medusa-eval --model {name} first"
        )
    directories = {file.parent.name: file for file in reports}
    file = directories.get(name_of_file(Path(bench)))
    if file is None:
        others = f", only on {', '.join(sorted(directories))}" if reports else ""
        raise CheckpointError(
            f"{name}: holds no evaluation on bench {bench} yet{others}; run"
            f" medusa-eval --model {name} --bench {bench} first"
        )
    return file
