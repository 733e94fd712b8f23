"""How long does a decoding step take on this machine, and how long must it take at least?

    python benchmarks/decode.py --quick
    python benchmarks/decode.py --shapes 7B --contexts 1024 --dtypes bfloat16

Times a plain step, steps over trees of 1 to 128 nodes, the Medusa heads alone, and steps of the
whole decoding loop, for single rows. Models: the tiny target model, random Llamas of 160M to 13B
parameters, or a model directory. Contexts, dtypes and settings are timed in turns.

Settings: `stock` (unchanged weights); `prepacked` (weights prepacked for oneDNN, and attention for
few rows); `static` (static buffers); `compiled` (compiled passes of single rows). On a GPU all
settings of a dtype share the weights in memory. There, steps in static buffers are replayed as CUDA
graphs, and compiled passes are part of the graphs: a GPU decodes like this with and without
`compile: true`. The column `steps` of a row says how its steps ran; this is the same for the plain
step, the trees, the heads and the loops.

The floor of a step is the larger of two times: its bytes of weights and cache divided by the
measured read bandwidth, and its operations divided by the measured matrix rate. Writes decode.md
and decode.json to `--out` after every context.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from checkout import ROOT
from decode_steps import (
    LOOP_TOKENS,
    PASSES,
    Context,
    Loop,
    how_steps_run,
    proposal,
)
from shapes import (
    SHAPES,
    SMALL_LLAMA,
    Rates,
    Sizes,
    default_dtypes,
    llama_config,
    measure_rates,
    random_model,
    time_call,
)
from shared import (
    command_line,
    describe_failure,
    machine_facts,
    table,
    warn_if_busy,
    write_page,
)
from transformers import AutoConfig

from medusa_train.cli.common import quiet_libraries
from medusa_train.errors import TargetModelError
from medusa_train.inference.cuda_graphs import (
    FixedShapeRunner,
    graph_runner,
    graph_unsupported_reason,
    use_cuda_graphs,
)
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.loading import load_target_model
from medusa_train.models.precision import (
    default_device,
    free_memory,
    is_out_of_memory,
    release_memory,
)
from medusa_train.models.prepack import prepack_linears
from medusa_train.models.target_model import TargetModel
from medusa_train.tree_search.fit import paths_by_product
from medusa_train.trees.tree import Tree

SETTINGS = ("stock", "prepacked", "static", "compiled")
#: Kinds of heads in the loops: over the whole vocabulary, over 32,768 tokens, or with the target
#: model's lm_head.
HEAD_KINDS = ("full", "32768", "shared")
HEADS = 5
HEADS_ROW = "heads"
LOOP_NODES = (16, 63)  # tree sizes of the timed decoding loops
MEMORY_SHARE = 0.9  # models may use this share of the free memory
# this many calls are timed in a row, after an untimed one, so that each finds the CPU caches as the
# call before it left them
BURST = 3
MAX_OVERTIME = 3  # stop after this many times --seconds, even with few calls
SLOW_SECONDS = 0.1  # a call that takes this long leaves nothing useful in any cache


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; defaults depend on the device."""
    cuda = torch.cuda.is_available()
    parser = command_line(__doc__, "runs/benchmarks/decode")
    parser.add_argument("--quick", action="store_true", help="two shapes, few trees, 5 seconds")
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="NAME",
        help=f"tiny, {', '.join(SHAPES)}, or a model directory",
    )
    parser.add_argument("--contexts", nargs="+", type=int, metavar="N", help="128 1024")
    parser.add_argument("--nodes", nargs="+", type=int, metavar="N", help="1 8 16 32 63")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=["float32", "bfloat16", "float16"],
        help="float32, and bfloat16 unless a CPU emulates it",
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=SETTINGS,
        help="stock prepacked compiled; on a GPU stock static compiled",
    )
    parser.add_argument(
        "--heads",
        nargs="+",
        choices=HEAD_KINDS,
        default=["full"],
        help="over the whole vocabulary, 32,768 tokens, or with the target model's lm_head (full)",
    )
    parser.add_argument("--seconds", type=float, help="per shape and context (20)")
    args = parser.parse_args(arguments)
    quick = args.quick
    if args.shapes is None:
        args.shapes = (
            ["tiny", "7B" if cuda else "160M"]
            if quick
            else ["tiny", *(SHAPES if cuda else ["160M"])]
        )
    args.contexts = args.contexts or [128, 1024]
    # 63 nodes and the root fill a tile of 64 rows; one more node would begin another tile
    args.nodes = sorted(set(args.nodes or ([1, 16, 63] if quick else [1, 8, 16, 32, 63])) - {0})
    args.dtypes = args.dtypes or default_dtypes()
    wanted = args.settings or (
        ("stock", "static", "compiled") if cuda else ("stock", "prepacked", "compiled")
    )
    args.settings = [setting for setting in SETTINGS if setting in wanted]
    args.seconds = args.seconds or (5.0 if quick else 20.0)
    if unknown := [
        name for name in args.shapes if name not in ("tiny", *SHAPES) and not Path(name).is_dir()
    ]:
        parser.error(
            f"--shapes {' '.join(unknown)}: not tiny, {', '.join(SHAPES)} or a model directory"
        )
    if not args.nodes:
        parser.error("--nodes needs a tree of one node or more")
    return args


class Unsupported(Exception):
    """A setting cannot be used with a model on this machine; the message is shown in its row."""


@dataclass
class Loaded:
    """A model in one dtype and setting, with Medusa heads of each kind.

    Attributes:
        ready_seconds: seconds spent on compiling and capturing so far, without loading weights.
    """

    target_model: TargetModel
    drafts: dict[str, MedusaDraft]
    ready_seconds: float = 0.0

    @property
    def draft(self) -> MedusaDraft:
        """The heads that are timed alone."""
        return next(iter(self.drafts.values()))


@dataclass
class Shape:
    """A model that is not loaded yet; `directory` is None for random weights."""

    name: str
    directory: Path | None
    config: Any
    sizes: Sizes

    @classmethod
    def of(cls, name: str) -> Shape:
        """Look up a name of the command line."""
        if name in SHAPES:
            config = llama_config(*SHAPES[name])
            return cls(name, None, config, Sizes.of(config))
        directory = ROOT / "data" / "tiny" if name == "tiny" else Path(name)
        config = AutoConfig.from_pretrained(directory).get_text_config()
        return cls(directory.name, directory, config, Sizes.of(config))

    @classmethod
    def or_small(cls, name: str, device: torch.device) -> Shape:
        """Look up a name; without a GPU, return a small shape in place of any other."""
        if device.type == "cuda":
            return cls.of(name)
        config = llama_config(*SMALL_LLAMA)
        return cls(f"small for {name}", None, config, Sizes.of(config))

    def bytes_needed(
        self, dtype: str, setting: str, cpu: bool, positions: int, shared: bool = False
    ) -> int:
        """Estimate the bytes of weights, heads and caches. On a CPU, prepacking and compiling copy
        the weights.

        Args:
            shared: whether the model uses the weights of another setting.
        """
        heads = self.sizes.head_weights(HEADS)
        copied = heads + self.sizes.read if setting in ("prepacked", "compiled") and cpu else 0
        caches = 4 * self.sizes.cached(positions, 1)  # one for the passes, three for the loops
        if shared:
            return caches * getattr(torch, dtype).itemsize
        return (self.sizes.total + heads + copied + caches) * getattr(torch, dtype).itemsize

    def load(
        self,
        dtype: str,
        setting: str,
        device: torch.device,
        heads: Sequence[str] = HEAD_KINDS[:1],
        shared: Loaded | None = None,
    ) -> Loaded:
        """Load target model and heads. Passes are compiled for torch's current number of threads.

        Args:
            shared: a loaded model in the same dtype, whose weights and heads are used again; only
                for random weights.

        Raises:
            Unsupported: the setting cannot be used with this model here.
        """
        if setting == "prepacked" and device.type != "cpu":
            raise Unsupported("weights are prepacked on CPUs only")
        if self.directory is None:
            weights = None if shared is None else shared.target_model.model
            model = random_model(self.config, getattr(torch, dtype), device, weights)
            target_model = TargetModel(model, None, self.name)
        else:
            target_model = load_target_model(str(self.directory), dtype=dtype, device=device)
        started = time.perf_counter()
        if shared is None:
            with device:  # otherwise large heads would be created on the CPU first
                drafts = {kind: heads_of(target_model, kind) for kind in heads}
        else:
            drafts = shared.drafts
        if setting == "prepacked":
            packed = [prepack_linears(module) for module in (target_model.model, *drafts.values())]
            if not any(packed):
                raise Unsupported(
                    "not prepacked: no faster here, dtype not supported, or too little memory"
                )
        elif setting == "static":
            target_model.step_runner = (
                FixedShapeRunner()
                if device.type == "cpu"
                else graph_runner(device, target_model.model)
            )
            if target_model.step_runner is None:
                raise Unsupported(
                    f"no CUDA graphs: the model {graph_unsupported_reason(target_model.model)}"
                )
        elif setting == "compiled":
            use_cuda_graphs(target_model)
            try:
                target_model.compile_passes()
            except TargetModelError as error:
                reason = (
                    str(error)
                    .splitlines()[0]
                    .removeprefix("compile: ")
                    .removesuffix("; leave the key out")
                )
                raise Unsupported(f"not compiled: {reason}") from error
            for draft in drafts.values():
                prepack_linears(draft)
        return Loaded(target_model, drafts, time.perf_counter() - started)


def heads_of(target_model: TargetModel, kind: str) -> MedusaDraft:
    """Create heads of one of `HEAD_KINDS`."""
    if kind.isdigit():
        size = min(int(kind), target_model.vocab_size)
        token_map = torch.arange(size, device=target_model.device)
        return MedusaDraft.from_target_model(
            target_model, HEADS, vocab_size=size, token_map=token_map
        )
    return MedusaDraft.from_target_model(target_model, HEADS, share_lm_head=kind == "shared")


Model = tuple[str, str]  # dtype and setting


def load_models(
    shape: Shape, args: argparse.Namespace, device: torch.device
) -> tuple[dict[Model, Loaded], list[tuple[Model, str]]]:
    """Load one model after the other as long as all fit into memory together. Return the loaded
    models, and for each other model why it was not loaded.
    """
    free, positions = free_memory(device), max(args.contexts) + max(args.nodes) + LOOP_TOKENS
    left = float("inf") if free is None else MEMORY_SHARE * free
    loaded: dict[Model, Loaded] = {}
    obstacles: list[tuple[Model, str]] = []
    for model in itertools.product(args.dtypes, args.settings):
        on_gpu = device.type == "cuda" and shape.directory is None
        alike = [one for (dtype, _), one in loaded.items() if dtype == model[0] and on_gpu]
        shared = alike[0] if alike else None
        size = shape.bytes_needed(*model, device.type == "cpu", positions, shared is not None)
        try:
            if size > left:
                raise Unsupported(
                    f"does not fit: needs {size / 1e9:.1f} GB, {left / 1e9:.1f} GB are left"
                )
            loaded[model] = shape.load(*model, device, args.heads, shared)
            left -= size
        except Unsupported as error:
            obstacles.append((model, str(error)))
        except Exception as error:
            obstacles.append((model, describe_failure(error)))
    return loaded, obstacles


@dataclass(frozen=True)
class Setup:
    """What all figures of one result row were measured with."""

    shape: str
    context: int
    dtype: str
    setting: str


@dataclass
class Timed:
    """One figure of the result.

    Attributes:
        call: the call that is timed.
        prepare: called before each call, untimed.
        floor: the least seconds that the call can take.
        how: returns how the target model's steps run; valid after they have run.
        seconds: the measured seconds of each call.
        obstacle: why the call could not be timed; "" if it could.
        ready: `Loaded.ready_seconds` of its model.
    """

    setup: Setup
    name: str
    call: Callable[[], object]
    prepare: Callable[[], None] = lambda: None
    floor: float = 0.0
    how: Callable[[], str] = lambda: PASSES
    seconds: list[float] = field(default_factory=list)
    obstacle: str = ""
    ready: float = 0.0


def likely_tree(nodes: int, depth: int = HEADS) -> Tree:
    """Build the best tree of `nodes` nodes, if rank r of every head is correct with probability
    0.6 x 0.4^r.
    """
    paths = paths_by_product([[0.6 * 0.4**rank for rank in range(10)]] * depth)
    return Tree.from_paths([path for _, path in itertools.islice(paths, nodes)])


def timed_calls(
    one: Loaded, shape: Shape, setup: Setup, nodes: Sequence[int], rates: Rates
) -> Iterator[Timed]:
    """Yield the passes, heads and loop steps of one setup, with their floors."""
    sizes, itemsize = shape.sizes, one.target_model.dtype.itemsize
    read = sizes.read + sizes.cached(setup.context, 1)
    trees = {0: Tree.empty(), **{count: likely_tree(count) for count in nodes}}

    def floor(weights: int, operations: int) -> float:
        return rates.floor(weights * itemsize, operations, setup.dtype)

    context = Context(one.target_model, setup.context, max(nodes))
    how = partial(how_steps_run, one.target_model)
    for count, tree in trees.items():
        least = floor(read, sizes.step_operations(count + 1, setup.context, 1))
        name, step = f"tree {count}" if count else "plain", context.step(tree)
        yield Timed(setup, name, step, step.prepare, least, how)
    largest = trees[max(trees)]
    depth = largest.max_depth
    least = floor(sizes.head_weights(depth), sizes.head_operations(depth, 1))
    yield Timed(
        setup, HEADS_ROW, proposal(one.target_model, one.draft, largest), floor=least, how=how
    )
    if setup.context + LOOP_TOKENS > one.target_model.max_context:
        return
    plain = Loop(one.target_model, one.draft, trees[0], setup.context)
    least = floor(read, sizes.step_operations(1, setup.context, 1))
    yield Timed(setup, "loop, plain", plain, plain.prepare, least, how)
    for kind, draft in one.drafts.items():
        for count in (n for n in LOOP_NODES if n in trees):
            tree = trees[count]
            loop = Loop(one.target_model, draft, tree, setup.context)
            heads = weights_of_heads(sizes, kind, tree.max_depth)
            operations = sizes.step_operations(count + 1, setup.context, 1) + 2 * heads
            name = f"loop, tree {count}" + ("" if kind == "full" else f", {kind} heads")
            yield Timed(setup, name, loop, loop.prepare, floor(read + heads, operations), how)


def weights_of_heads(sizes: Sizes, kind: str, heads: int) -> int:
    """Return how many weights `heads` heads of a kind read; a shared lm_head counts once."""
    if kind == "full":
        return sizes.head_weights(heads)
    blocks = heads * (sizes.hidden**2 + sizes.hidden)
    if kind == "shared":
        return blocks + sizes.vocab * sizes.hidden
    return blocks + heads * min(int(kind), sizes.vocab) * sizes.hidden


def cases_of(
    shape: Shape, models: Mapping[Model, Loaded], nodes: Sequence[int], context: int, rates: Rates
) -> list[Timed]:
    """List everything that is timed at one context. A setup that cannot run gets one `Timed` with
    its obstacle.
    """
    cases: list[Timed] = []
    for (dtype, setting), one in models.items():
        setup, limit = Setup(shape.name, context, dtype, setting), one.target_model.max_context
        obstacle = (
            "" if context + max(nodes) <= limit else f"not run: the model has {limit:,} positions"
        )
        calls: list[Timed] = []
        started = time.perf_counter()
        try:
            calls = [] if obstacle else list(timed_calls(one, shape, setup, nodes, rates))
            # run each call once, so that compiling and capturing are not timed
            for case in calls if one.target_model.compiled or one.target_model.step_runner else []:
                case.prepare()
                case.call()
        except Exception as error:
            # continue, because the other settings do not depend on this one
            obstacle = "does not fit" if is_out_of_memory(error) else describe_failure(error)
            calls = []
            release_memory()
        one.ready_seconds += time.perf_counter() - started
        for case in calls:
            case.ready = one.ready_seconds
        cases += calls or [Timed(setup, "plain", lambda: None, obstacle=obstacle)]
    return cases


def time_in_turns(
    cases: Sequence[Timed],
    device: torch.device,
    seconds: float,
    *,
    minimum: int = 5,
    maximum: int = 200,
) -> None:
    """Time all cases in turns, a few calls of each, so that a drift of the machine's speed affects
    all cases equally.

    Ends when `seconds` are spent and every case has `minimum` calls, or when every case has
    `maximum` calls. After `MAX_OVERTIME * seconds` it ends with fewer calls, at least one for each
    case. A case that fails gets an obstacle.
    """
    spent, fewest = 0.0, 0
    while (
        not fewest
        or (fewest < minimum and spent < MAX_OVERTIME * seconds)
        or (fewest < maximum and spent < seconds)
    ):
        active = [case for case in cases if not case.obstacle]
        if not active:
            break
        for case in active:
            spent += _burst(case, device)
        fewest = min((len(case.seconds) for case in cases if not case.obstacle), default=0)


def _burst(case: Timed, device: torch.device) -> float:
    """Time a few calls in a row; return the seconds spent, warm-up included."""
    spent = 0.0
    try:
        case.prepare()
        if not case.seconds or case.seconds[-1] < SLOW_SECONDS:
            spent += time_call(case.call, device)
        for _ in range(BURST):
            case.prepare()
            case.seconds.append(time_call(case.call, device))
            spent += case.seconds[-1]
            if case.seconds[-1] >= SLOW_SECONDS:
                break
    except Exception as error:
        case.obstacle = "does not fit" if is_out_of_memory(error) else describe_failure(error)
        case.seconds.clear()
    return spent


@dataclass
class Row:
    """The figures of one setup by name: median milliseconds, and the floor of each."""

    setup: Setup
    ms: dict[str, float] = field(default_factory=dict)
    floor_ms: dict[str, float] = field(default_factory=dict)
    obstacle: str = ""
    steps: str = PASSES
    ready: float = 0.0

    def over_plain(self, name: str) -> float | None:
        """Return a latency divided by the latency of the plain step (for a loop: of the plain loop)
        in the same row.
        """
        base = self.ms.get("loop, plain" if name.startswith("loop") else "plain")
        return self.ms[name] / base if base and name in self.ms else None


def rows_of(cases: Sequence[Timed]) -> list[Row]:
    """Collect the figures of each setup into one row."""
    rows: dict[Setup, Row] = {}
    for case in cases:
        row = rows.setdefault(case.setup, Row(case.setup))
        if case.seconds:
            row.ms[case.name] = 1000 * median(case.seconds)
            row.floor_ms[case.name] = 1000 * case.floor
            row.steps = case.how()
            row.ready = case.ready
        else:
            row.obstacle = case.obstacle or "not measured"
    return list(rows.values())


def write_report(out: Path, machine: Mapping[str, Any], rates: Rates, rows: Sequence[Row]) -> str:
    """Write decode.md and decode.json; return the page."""
    content = []
    for row in rows:
        figures = {
            name: [round(ms, 3), round(row.floor_ms[name], 3)] for name, ms in row.ms.items()
        }
        measured = {
            "steps": row.steps,
            "ms_and_floor": figures,
            "plain_tokens_per_s": round(1000 / row.ms["plain"], 1) if "plain" in row.ms else None,
            "ready_s": round(row.ready, 1),
        }
        content.append(
            {**asdict(row.setup), **(measured if figures else {"obstacle": row.obstacle})}
        )
    record = {"machine": machine, "rates": asdict(rates), "rows": content}
    return write_page(out, "decode", "Latency of decoding steps", record, tables(rates, rows))


def tables(rates: Rates, rows: Sequence[Row]) -> list[str]:
    """Format the note and the table. Trees and loops are shown relative to the plain step or loop
    of their row, heads in milliseconds.
    """
    names = list(
        dict.fromkeys(
            name for row in rows for name in row.ms if name not in ("plain", "loop, plain")
        )
    )
    titles = ["shape", "context", "dtype", "setting", "steps", "ready s", "plain ms"]
    titles += ["plain tokens/s", "floor / plain"]
    titles += [f"{name} ms" if name == HEADS_ROW else name for name in names]
    lines = []
    for row in rows:
        at = row.setup
        first = [at.shape, f"{at.context:,}", at.dtype, at.setting]
        if "plain" not in row.ms:
            lines.append([*first, row.obstacle, *[""] * (len(names) + 4)])
            continue
        plain = row.ms["plain"]
        lines.append(
            [
                *first,
                row.steps,
                f"{row.ready:.0f}",
                f"{plain:.3f}",
                f"{1000 / plain:,.1f}",
                f"{row.floor_ms['plain'] / plain:.2f}",
                *(_cell(row, n) for n in names),
            ]
        )
    speeds = ", ".join(
        f"{dtype} {rate / 1e12:,.3g} Tflop/s" for dtype, rate in rates.matrix.items()
    )
    note = (
        f"Measured rates: reads {rates.bandwidth / 1e9:,.1f} GB/s; products {speeds}. Trees and"
        " loops with trees: over the plain step or loop of the same row, and steps per second, which"
        " the tokens of a step multiply. A floor above the plain step was read from caches. Ready: seconds"
        " to compile and capture, weights apart."
    )
    return [note, table(titles, lines, 5)]


def _cell(row: Row, name: str) -> str:
    if name == HEADS_ROW:
        return f"{row.ms[name]:.3f}" if name in row.ms else ""
    ratio = row.over_plain(name)
    return "" if ratio is None else f"{ratio:.2f} ({1000 / row.ms[name]:,.0f}/s)"


def measure_shape(
    shape: Shape, args: argparse.Namespace, device: torch.device, rates: Rates
) -> Iterator[list[Row]]:
    """Measure one shape; yield the rows of each context."""
    loaded, obstacles = load_models(shape, args, device)
    yield [Row(Setup(shape.name, 0, *model), obstacle=obstacle) for model, obstacle in obstacles]
    for context in args.contexts if loaded else ():
        cases = cases_of(shape, loaded, args.nodes, context, rates)
        time_in_turns(cases, device, args.seconds)
        yield rows_of(cases)
        del cases
        release_memory()
    del loaded
    torch.compiler.reset()  # free the compiled passes and their weights
    release_memory()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything that was asked for, and write the result."""
    quiet_libraries()
    args = parse_arguments(arguments)
    machine = machine_facts(__file__, arguments)
    device = default_device()
    warn_if_busy()
    rates = measure_rates(device, args.dtypes, min(2.0, args.seconds / 4))
    print(f"reads {rates.bandwidth / 1e9:,.1f} GB/s", flush=True)
    rows: list[Row] = []
    page = ""
    for name in args.shapes:
        for new in measure_shape(Shape.of(name), args, device, rates):
            rows += new
            page = write_report(args.out, machine, rates, rows)
            print(f"{name}: {len(rows)} rows", flush=True)
    print(f"{page}\nwrote {args.out}/decode.md, decode.json")
    return 1 if any(row.obstacle.startswith("failed: ") for row in rows) else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all models are local
    sys.exit(main())
