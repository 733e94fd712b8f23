"""What does a step of a batch cost with transformers' attention, and with ours?

    python benchmarks/batch.py
    python benchmarks/batch.py --shapes tiny --rows 8 --nodes 0 16 --dtypes float32 --seconds 2

Times plain steps and passes over a tree in a batch of rows, on a random Llama of SmolLM2-135M's shape, the tiny
backbone or a model directory. Both attentions run in turns on the same weights and the same cache: transformers'
"sdpa", and `models.attention`, which does not copy keys and values for the query heads that share them. Counts the
bytes that the operations of one step allocate. Writes batch.md and batch.json to `--out`. The CUDA path was never run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

import torch  # noqa: E402
from decode import likely_tree  # noqa: E402
from shapes import llama_config, random_model, time_call  # noqa: E402
from shared import machine_facts, machine_line, table, warn_if_busy, write_result  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from medusa_train.cli.common import quiet_libraries  # noqa: E402
from medusa_train.evaluation.choose_dtype import release_memory  # noqa: E402
from medusa_train.inference.accept import accept  # noqa: E402
from medusa_train.models.backbone import Backbone  # noqa: E402
from medusa_train.models.hf_config import head_dim  # noqa: E402
from medusa_train.models.loading import load_backbone  # noqa: E402
from medusa_train.trees.kv_cache import BatchCache  # noqa: E402
from medusa_train.trees.masks import additive_mask, mask_with_prefix  # noqa: E402
from medusa_train.trees.tree import Tree  # noqa: E402

#: hidden size, MLP size, layers, attention heads, key/value heads, vocabulary
SMOLLM2 = (576, 1536, 30, 9, 3, 49152)
STOCK = "sdpa"


@dataclass
class Row:
    """One setup: median milliseconds and allocated bytes of a step, by attention."""

    shape: str
    dtype: str
    rows: int
    context: int
    nodes: int
    keys_mb: float
    ms: dict[str, float] = field(default_factory=dict)
    allocated_mb: dict[str, float] = field(default_factory=dict)


class AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations return, views excluded; kernels' own buffers are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for new in (x.untyped_storage() for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            self.count += 0 if new.data_ptr() in before else new.nbytes()
        return out


def load(shape: str, dtype: str, device: torch.device) -> Backbone:
    """Load a backbone by name or directory."""
    if shape == "135M":
        return Backbone(random_model(llama_config(*SMOLLM2), getattr(torch, dtype), device), None, shape)
    return load_backbone(str(ROOT / "data" / "tiny") if shape == "tiny" else shape, dtype=dtype, device=device)


@torch.inference_mode()
def new_step(backbone: Backbone, rows: int, context: int, tree: Tree) -> Callable[[], None]:
    """Return a step of `rows` rows over `context` cached positions, which leaves the cache as it was.

    As in decoding, rows have different lengths: each is one position shorter than the one before.
    """
    cache = BatchCache(backbone.num_layers, context + tree.size + 1)
    shape = (rows, backbone.config.num_key_value_heads, context, head_dim(backbone.config))
    states = torch.randn(shape, device=backbone.device, dtype=backbone.dtype)
    for layer in range(backbone.num_layers):
        cache.write(layer, states, states)
    lengths = [context - row for row in range(rows)]
    cache.commit_rows(lengths)
    tree = tree.to(backbone.device)
    tokens = torch.arange(tree.size + 1, device=backbone.device).expand(rows, -1) % backbone.vocab_size
    block = additive_mask(tree.ancestors, backbone.dtype)

    @torch.inference_mode()
    def step() -> None:
        positions = tree.depths[None] + cache.row_lengths(backbone.device)
        hidden = backbone.run(tokens, positions=positions, mask=mask_with_prefix(cache, block), cache=cache).hidden
        accepted = accept(None, tokens, backbone.logits(hidden), tree)
        cache.keep_rows([path for path, _ in accepted])
        cache.lengths, cache.length = list(lengths), context

    return step


def measure(backbone: Backbone, row: Row, seconds: float, device: torch.device) -> None:
    """Time both attentions in turns until `seconds` are spent, three times each or more, and count allocations."""
    tree = likely_tree(row.nodes) if row.nodes else Tree.empty()
    step = new_step(backbone, row.rows, row.context, tree)
    attentions = [STOCK, *({backbone.attention} - {STOCK})]
    times: dict[str, list[float]] = {name: [] for name in attentions}
    for name in attentions:  # also the warm-up
        backbone.model.set_attn_implementation(name)
        with AllocatedBytes() as allocated:
            step()
        row.allocated_mb[name] = allocated.count / 1e6
    while sum(map(sum, times.values())) < seconds or len(times[STOCK]) < 3:
        for name in attentions:
            backbone.model.set_attn_implementation(name)
            times[name].append(time_call(step, device))
    row.ms = {name: 1000 * median(calls) for name, calls in times.items()}
    backbone.model.set_attn_implementation(backbone.attention)


def rows_of(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Measure all setups; yields each when it is done."""
    for shape in args.shapes:
        for dtype in args.dtypes:
            backbone = load(shape, dtype, device)
            for nodes in args.nodes:
                context = min(args.context, backbone.max_context - nodes - 1)
                keys = 2 * args.rows * backbone.config.num_key_value_heads * context * head_dim(backbone.config)
                size = backbone.num_layers * keys * backbone.dtype.itemsize / 1e6
                row = Row(Path(shape).name, dtype, args.rows, context, nodes, size)
                measure(backbone, row, args.seconds, device)
                yield row
            del backbone
            release_memory()


def markdown(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    """Format the page."""
    titles = ["shape", "dtype", "rows", "context", "tree", "keys and values MB"]
    titles += ["sdpa ms", "ours ms", "sdpa / ours", "sdpa allocates MB", "ours allocates MB"]
    lines = []
    for row in rows:
        ours = next((name for name in row.ms if name != STOCK), STOCK)
        first = [row.shape, row.dtype, str(row.rows), str(row.context), str(row.nodes), f"{row.keys_mb:.1f}"]
        times = [f"{row.ms[STOCK]:.2f}", f"{row.ms[ours]:.2f}", f"{row.ms[STOCK] / row.ms[ours]:.2f}"]
        lines.append([*first, *times, f"{row.allocated_mb[STOCK]:.1f}", f"{row.allocated_mb[ours]:.1f}"])
    note = (
        "A step: backbone, logits, acceptance and compaction of the cache, for all rows at once; medians, both "
        "attentions in turns. Tree 0 is plain decoding."
    )
    parts = ["# Steps of a batch", machine_line(machine), note, table(titles, lines, 2)]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything that was asked for, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/batch"), metavar="DIR")
    parser.add_argument("--shapes", nargs="+", default=["tiny", "135M"], help="tiny, 135M, or a model directory")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--nodes", nargs="+", type=int, default=[0, 8], help="of the tree; 0: plain decoding")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=12.0, help="per setup")
    args = parser.parse_args(arguments)
    if args.context < args.rows:
        parser.error("--context must be at least --rows, since each row is one position shorter than the one before")
    quiet_libraries()
    machine = machine_facts(__file__, arguments)
    warn_if_busy(machine)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    page = ""
    for row in rows_of(args, device):
        rows.append(row)
        page = markdown(machine, rows)
        write_result(args.out, "batch", {"machine": machine, "rows": [asdict(row) for row in rows]}, page)
        print(f"{row.shape} {row.dtype}, tree of {row.nodes}: done", flush=True)
    print(f"{page}\nwrote {args.out}/batch.md, batch.json")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all models are local
    sys.exit(main())
