"""What a bench ran on, for its tables: machine, versions, command, date. Knows no bench and measures nothing."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

BUSY = 0.25  # load average per core beyond which somebody else is running


def facts(script: str, arguments: Sequence[str] | None) -> dict[str, Any]:
    """Where the figures come from, how busy it was before they were taken, and how to take them again.

    Args:
        script: the bench's file. arguments: those of its command line; None for the process's own.
    """
    import torch
    import transformers

    cuda = torch.cuda.is_available()
    given = sys.argv[1:] if arguments is None else arguments
    return {
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "kind": "cuda" if cuda else "cpu",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "transformers": transformers.__version__,
        "command": " ".join(["python", f"benchmarks/{Path(script).name}", *given]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def sentence(machine: dict[str, Any]) -> str:
    """The facts as a line of Markdown."""
    cuda = f" (CUDA {machine['cuda']})" if machine["cuda"] else ""
    return (
        f"{machine['device']}, {machine['cores']} cores, {machine['threads']} threads, Python {machine['python']}, "
        f"torch {machine['torch']}{cuda}, transformers {machine['transformers']}, {machine['date']}, "
        f"load average {machine['load']:.2f} before. `{machine['command']}`"
    )


def warning(machine: dict[str, Any]) -> str | None:
    """A line for the terminal where the machine was busy before anything was measured."""
    if machine["load"] <= BUSY * (machine["cores"] or 1):
        return None
    return f"load average {machine['load']:.2f}: something else is running, the times will be too long"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """A Markdown table; the first `words` columns are text, the others numbers, flush right."""
    marks = ["---" if place < words else "---:" for place in range(len(titles))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, marks, *rows))
