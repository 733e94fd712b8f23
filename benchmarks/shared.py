"""Machine facts, Markdown tables and result files, shared by all benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from medusa_train.io import replace_text

MAX_JSON_BYTES = 20_000  # most bytes of a result file; raw measurements stay in runs/
BUSY_PERCENT = 25  # the machine counts as busy if more than this share of all cores is used


def command_line(description: str | None, out: str) -> argparse.ArgumentParser:
    """Return a parser that shows a script's docstring as help, and has the option `--out`, whose
    default is `out`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(out), metavar="DIR")
    return parser


def describe_failure(error: BaseException) -> str:
    """Return the type of an error and its first line, for the row of a failed measurement."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"failed: {type(error).__name__}: {lines[0][:200]}"


def target_model_note(target_model: str) -> str:
    """Return the note that every comparison of drafts on the tiny target model needs; empty for
    other target models.
    """
    if Path(target_model).name != "tiny":
        return ""
    return (
        "The tiny target model was trained with Medusa-shaped heads: that flatters Medusa against other"
        " drafts."
    )


def machine_facts(script: str, arguments: Sequence[str] | None) -> dict[str, Any]:
    """Collect machine, versions, load, command and date for a result page.

    Args:
        script: path of the benchmark.
        arguments: its command line; None: this process's command line.
    """
    import torch
    import transformers

    cuda = torch.cuda.is_available()
    words = sys.argv[1:] if arguments is None else arguments
    return {
        "device": torch.cuda.get_device_name() if cuda else cpu_name(),
        "kind": "cuda" if cuda else "cpu",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "transformers": transformers.__version__,
        "command": " ".join(["python", f"benchmarks/{Path(script).name}", *words]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def cpu_name() -> str:
    """Return the CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def machine_line(machine: Mapping[str, Any]) -> str:
    """Format `machine_facts` as one paragraph of Markdown."""
    cuda = f" (CUDA {machine['cuda']})" if machine["cuda"] else ""
    gpu = "" if machine["kind"] == "cuda" else " Not run on a GPU."
    return (
        f"{machine['device']}, {machine['cores']} cores, {machine['threads']} threads, Python"
        f" {machine['python']}, torch {machine['torch']}{cuda}, transformers"
        f" {machine['transformers']}, {machine['date']}, load average {machine['load']:.2f} before."
        f" `{machine['command']}`{gpu}"
    )


def stand_in_note(machine: Mapping[str, Any]) -> str:
    """Return a note that a small model was measured in place of a large one; empty on a GPU."""
    if machine["kind"] == "cuda":
        return ""
    return " **Without a GPU a small stand-in ran; its figures are meaningless.**"


def warn_if_busy() -> None:
    """Print a warning if other processes run now, before the benchmark begins."""
    import psutil

    # the load average would also contain work of this process, or of the benchmark before it
    percent = psutil.cpu_percent(interval=0.5)
    if percent > BUSY_PERCENT:
        print(f"warning: other processes use {percent:.0f} % of all cores: times will be too long")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Format a Markdown table; columns after the first `text_columns` are right-aligned."""
    marks = ["---" if column < text_columns else "---:" for column in range(len(titles))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, marks, *rows))


def rounded(value: Any, digits: int = 4) -> Any:
    """Round all floats of a JSON value."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value


def to_json(record: Mapping[str, Any]) -> str:
    """Serialize with one line per entry of a top-level list or object, so that results can be read
    and compared.
    """
    parts = []
    for key, value in record.items():
        text = json.dumps(value)
        if value and isinstance(value, dict):
            lines = [f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items()]
            text = "{\n" + ",\n".join(lines) + "\n }"
        elif value and isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_page(
    out: Path, name: str, title: str, record: Mapping[str, Any], parts: Sequence[str]
) -> str:
    """Write `name`.json, and `name`.md with the title, the machine and `parts`; return the page."""
    page = "\n\n".join([f"# {title}", machine_line(record["machine"]), *filter(None, parts)]) + "\n"
    write_result(out, name, record, page)
    return page


def write_result(out: Path, name: str, record: Mapping[str, Any], page: str) -> None:
    """Write `name`.md and `name`.json to `out`; warn if the JSON is too large to be committed."""
    text = to_json(record)
    if len(text) > MAX_JSON_BYTES:
        print(
            f"warning: {name}.json has {len(text)} bytes, more than {MAX_JSON_BYTES}; measure fewer"
            " cases at once"
        )
    out.mkdir(parents=True, exist_ok=True)
    replace_text(out / f"{name}.json", text)
    replace_text(out / f"{name}.md", page)
