"""Is attention with split keys right on this GPU, and how fast beside what the project has?

    python benchmarks/gpu_kernels.py --out runs/gpu_kernels

Each shape is compared with float64 and timed in a CUDA graph over many layers' keys and values, so that
no cache holds them: `now` is `folded_head_attention`, `split` the kernel of the key gpu_kernels, `floor`
the time to read keys and values once. Writes gpu_kernels.md and gpu_kernels.json to `--out` after every
shape. Exits 1 if a result is wrong. Without a GPU small shapes run in Triton's interpreter, if
TRITON_INTERPRET=1, and nothing is timed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

import torch  # noqa: E402
from shapes import read_bandwidth  # noqa: E402
from shared import describe_failure, machine_facts, table, write_page  # noqa: E402
from torch import Tensor  # noqa: E402

from medusa_train.models.attention import folded_head_attention  # noqa: E402

MOST_ERROR = 1e-2  # in bfloat16, relative to the norm of the result
REPEATS = 20  # replays of a graph, of which the median counts
Attention = Callable[[Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """One attention: of B rows, H key heads, G query heads for each, n queries and S keys."""

    rows: int
    kv_heads: int
    groups: int
    queries: int
    keys: int
    dim: int = 128
    layers: int = 16


def gpu_shapes() -> list[Shape]:
    """List single rows of 7B and 8B models, and batches."""
    shapes = []
    for kv_heads, groups in ((32, 1), (8, 4)):
        for keys in (1024, 4096):
            shapes += [Shape(1, kv_heads, groups, queries, keys) for queries in (1, 17, 64, 65)]
    shapes.append(Shape(1, 3, 3, 64, 1024, dim=64))  # SmolLM2
    for rows, queries in ((8, 17), (32, 1), (32, 17), (64, 1)):
        shapes.append(Shape(rows, 8, 4, queries, 1024, layers=6))
    return shapes


def cpu_shapes() -> list[Shape]:
    """List shapes that the interpreter computes in seconds."""
    return [Shape(1, 2, 3, 5, 200, 32, 2), Shape(2, 2, 1, 1, 130, 32, 2)]


def random_mask(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tree's mask for rows of different lengths."""
    rows, queries, keys = shape.rows, shape.queries, shape.keys
    mask = torch.full((rows, 1, queries, keys + 8), float("-inf"), dtype=dtype, device=device)
    itself = torch.eye(queries, dtype=torch.bool, device=device)
    for row in range(rows):
        length = keys - queries - min(17 * row, keys // 2)
        mask[row, 0, :, :length] = 0
        above = (torch.rand(queries, queries, device=device) < 0.3).tril()
        mask[row, 0, :, length : length + queries].masked_fill_(itself | above, 0)
    return mask[..., :keys]


def graph_microseconds(attention: Attention, pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the median microseconds of one call, in a CUDA graph of one call for each pair."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for pair in pairs[:2]:
            attention(*pair)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for pair in pairs:
            attention(*pair)
    times = []
    for _ in range(REPEATS):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(pairs))
    return median(times)


def measure(shape: Shape, device: torch.device, bandwidth: float | None) -> dict[str, Any]:
    """Check one shape, and time it on a GPU."""
    from medusa_train.models.split_attention import split_attention

    # 1. queries, keys and values of every layer; NaN behind what is read
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, kv_heads, groups, queries, keys, dim, layers = shape
    pairs = []
    for _ in range(layers):
        storage = torch.randn(2, rows, kv_heads, keys + 1, dim, device=device).to(dtype)
        storage[..., keys:, :] = float("nan")
        pairs.append((storage[0, :, :, :keys], storage[1, :, :, :keys]))
    query = torch.randn(rows, kv_heads * groups, queries, dim, device=device).to(dtype)
    folded = query.reshape(rows, kv_heads, groups * queries, dim)
    mask = random_mask(shape, dtype, device)
    scale = dim**-0.5

    # 2. the reference
    key, value = pairs[0]
    scores = folded.double() @ key.double().transpose(2, 3) * scale
    scores += mask.double().repeat(1, 1, groups, 1)
    expected = scores.softmax(-1) @ value.double()

    # 3. both ways
    row: dict[str, Any] = shape._asdict()
    if bandwidth is not None:
        read = 2 * rows * kv_heads * keys * dim * dtype.itemsize
        row["floor_us"] = round(read / bandwidth * 1e6, 1)
    ways: dict[str, Attention] = {
        "now": lambda k, v: folded_head_attention(query, k, v, mask, scale),
        "split": lambda k, v: split_attention(folded, k, v, mask, scale),
    }
    for name, way in ways.items():
        try:
            out = way(*pairs[0]).reshape(expected.shape).double()
        except Exception as error:
            # the next shapes do not depend on this one
            row[f"{name}_error"] = None
            row[f"{name}_failure"] = describe_failure(error)
            continue
        error = float((out - expected).norm() / expected.norm())
        row[f"{name}_error"] = float(f"{error:.1e}")
        if device.type == "cuda":
            row[f"{name}_us"] = round(graph_microseconds(way, pairs), 1)
    return row


def is_right(row: dict[str, Any]) -> bool:
    """Return whether the kernel ran and was exact enough."""
    error = row["split_error"]
    return error is not None and error < MOST_ERROR


def write_report(out: Path, machine: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Write gpu_kernels.md and gpu_kernels.json; returns the page."""
    titles = ["rows", "key heads", "groups", "queries", "keys", "head"]
    titles += ["floor us", "now us", "split us", "now error", "split error"]
    names = ["rows", "kv_heads", "groups", "queries", "keys", "dim"]
    names += ["floor_us", "now_us", "split_us", "now_error", "split_error"]
    lines = [[str(row.get(name, "")) for name in names] for row in rows]
    record = {"machine": machine, "attention": list(rows)}
    return write_page(
        out, "gpu_kernels", "Attention of few queries", record, [table(titles, lines)]
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/kernels"), metavar="DIR")
    return parser.parse_args(arguments)


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    """Check and measure all shapes; the exit code is 1 if a result is wrong."""
    args = parse_arguments(arguments)
    cuda = torch.cuda.is_available()
    if not cuda and os.environ.get("TRITON_INTERPRET") != "1":
        print("there is no GPU: set TRITON_INTERPRET=1 to check small shapes", file=sys.stderr)
        return 2
    device = torch.device("cuda" if cuda else "cpu")
    machine = machine_facts(__file__, arguments)
    torch.manual_seed(0)
    bandwidth = read_bandwidth(device) if cuda else None
    rows: list[dict[str, Any]] = []
    page = ""
    for shape in gpu_shapes() if cuda else cpu_shapes():
        rows.append(measure(shape, device, bandwidth))
        page = write_report(args.out, machine, rows)
    print(page)
    wrong = [row for row in rows if not is_right(row)]
    for row in wrong:
        print(f"wrong: {row}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
