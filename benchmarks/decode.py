"""Latency of decoding steps on this machine, beside the least that they can take here.

    python benchmarks/decode.py --quick                        # some minutes
    python benchmarks/decode.py                                # everything that the machine can; an hour on two cores
    python benchmarks/decode.py --shapes 7B --contexts 1024 --batch 1 --dtypes bfloat16 --profile

For every shape (the tiny backbone; random Llamas of 160M to 13B parameters; or a model directory) it times a plain
step, passes over trees of 1 to 128 nodes, the heads apart, and steps of the whole decoding loop, at several contexts
and batches, over dtypes, settings (stock weights, packed ones, compiled passes) and thread counts, all in turn. Beside
each stands its floor: bytes of weights and cache over the measured read bandwidth, or operations over the measured
matrix rate, whichever is more. Writes decode.json, decode.md and decode.png (with matplotlib) to `--out`, after every
batch and context, so that a run may be stopped; prints the goals at the end. `--profile` adds
torch.profiler's tables of a plain step and of a tree step. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]  # the sibling modules, and the package where it is not installed

import torch  # noqa: E402
from decode_case import LOOP_TOKENS, Context, Loop, Point, Timed, free, proposal, take_turns, tree_of  # noqa: E402
from decode_floor import Rates, measure_rates  # noqa: E402
from decode_model import (  # noqa: E402
    HEADS,
    SETTINGS,
    SPARE,
    Loaded,
    Model,
    Shape,
    Unusable,
    models_together,
    on_threads,
)
from decode_profile import profile_step  # noqa: E402
from decode_report import Row, goal_lines, rows_of, write_report  # noqa: E402
from machine import facts, warning  # noqa: E402
from random_llama import SHAPES  # noqa: E402

from medusa_train.cli.common import quiet_libraries  # noqa: E402
from medusa_train.evaluation.choose_dtype import is_out_of_memory, release_memory  # noqa: E402
from medusa_train.models.precision import free_memory  # noqa: E402
from medusa_train.trees.tree import Tree  # noqa: E402

LOOP_NODES = (16, 64)  # trees that the whole loop is timed with, beside plain decoding
PROFILED = {"cpu": 16, "cuda": 64}  # nodes of the tree step whose operators are listed


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what is left open depends on the device."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/decode"), metavar="DIR", help="results")
    parser.add_argument("--quick", action="store_true", help="few shapes, contexts and trees, batch 1, 5 seconds")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help=f"tiny, {', '.join(SHAPES)}, or a model directory")
    parser.add_argument("--contexts", nargs="+", type=int, metavar="N", help="128 1024 3968: with a tree, 4,096")
    parser.add_argument("--nodes", nargs="+", type=int, metavar="N", help="1 4 8 16 32 64 128")
    parser.add_argument("--batch", nargs="+", type=int, metavar="B", help="1 4 8")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"], help="float32 bfloat16")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, help="all; on a GPU stock compiled")
    parser.add_argument("--threads", nargs="+", type=int, metavar="N", help="on a CPU; all cores")
    parser.add_argument("--seconds", type=float, help="for one shape, batch and context (20)")
    parser.add_argument("--profile", action="store_true", help="write operators of a plain and a tree step as well")
    asked = parser.parse_args(arguments)
    quick = asked.quick
    asked.shapes = asked.shapes or _shapes(quick, cuda)
    asked.contexts = asked.contexts or ([128, 1024] if quick else [128, 1024, 3968])
    asked.nodes = sorted(set(asked.nodes or ([1, 16, 64] if quick else [1, 4, 8, 16, 32, 64, 128])) - {0})
    asked.batch = asked.batch or ([1] if quick else [1, 4, 8])
    asked.dtypes = asked.dtypes or ["float32", "bfloat16"]
    settings = asked.settings or (("stock", "compiled") if cuda else SETTINGS)
    asked.settings = [setting for setting in SETTINGS if setting in settings]
    asked.threads = [0] if cuda else asked.threads or [torch.get_num_threads()]
    asked.seconds = asked.seconds or (5.0 if quick else 20.0)
    if unknown := [name for name in asked.shapes if name not in ("tiny", *SHAPES) and not Path(name).is_dir()]:
        parser.error(f"--shapes {' '.join(unknown)}: neither tiny, {', '.join(SHAPES)} nor a model directory")
    if not asked.nodes:
        parser.error("--nodes needs a tree of one node or more")
    return asked


def _shapes(quick: bool, cuda: bool) -> list[str]:
    if quick:
        return ["tiny", "7B"] if cuda else ["tiny", "160M"]
    return ["tiny", *SHAPES] if cuda else ["tiny", "160M"]


def cases_of(shape: Shape, loaded: dict[Model, Loaded], asked: argparse.Namespace, place: Point) -> list[Timed]:
    """Everything that is measured at one context and batch, over all dtypes, settings and threads."""
    cases: list[Timed] = []
    for model, one in loaded.items():
        point = replace(place, dtype=model.dtype, setting=model.setting)
        obstacle = _obstacle(shape, one, point, max(asked.nodes))
        made: list[Timed] = []
        try:
            made = [] if obstacle else list(_calls(one, asked, point))
            if one.backbone.compiled is not None:
                _call_once(made, max(asked.threads))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            obstacle = "does not fit"
            release_memory()
        if obstacle:
            cases.append(Timed(point, obstacle=obstacle))
            continue
        for threads in asked.threads:
            if one.backbone.compiled is not None and threads != max(asked.threads):
                other = f"compiled for {max(asked.threads)} threads; measure others in a run of their own"
                cases.append(Timed(replace(point, threads=threads), obstacle=other))
                continue
            cases += [replace(case, point=replace(case.point, threads=threads), seconds=[]) for case in made]
    return cases


def _call_once(cases: Sequence[Timed], threads: int) -> None:
    """A cache of another size may have to be compiled for, which must not use up the seconds that are measured."""
    with on_threads(threads):
        for case in cases:
            assert case.call is not None
            case.ready()
            case.call()


def _obstacle(shape: Shape, one: Loaded, point: Point, nodes: int) -> str:
    backbone = one.backbone
    if point.context + nodes > backbone.max_context:
        return f"can't run: the model reads {backbone.max_context:,} positions"
    if backbone.compiled is not None and point.batch > 1:
        return "can't run: passes are compiled for single rows"
    room, needed = free_memory(backbone.device), shape.sizes.cached(point.context + nodes, point.batch)
    size = needed * backbone.dtype.itemsize
    if room is not None and size > SPARE * room:
        return f"does not fit: its cache needs {size / 1e9:.1f} GB, {room / 1e9:.1f} GB are free"
    return ""


def _calls(one: Loaded, asked: argparse.Namespace, place: Point) -> Iterator[Timed]:
    """Passes, heads and, for a single row, the loop."""
    draft = one.drafts["heads"]
    context = Context(one.backbone, place.context, place.batch, max(asked.nodes))
    trees = {nodes: tree_of(nodes, HEADS) for nodes in asked.nodes}
    for nodes, tree in {0: Tree.empty(), **trees}.items():
        yield Timed(replace(place, what="step", nodes=nodes), context.step(tree))
    largest = trees[max(trees)]
    for what, heads in one.drafts.items():
        point = replace(place, what=what, heads=largest.max_depth)
        yield Timed(point, proposal(one.backbone, heads, largest, place.batch))
    if place.batch > 1 or place.context + LOOP_TOKENS > one.backbone.max_context:
        return
    for nodes in (0, *(n for n in LOOP_NODES if n in trees)):
        tree = trees.get(nodes, Tree.empty())
        loop = Loop(one.backbone, draft, tree, place.context)
        yield Timed(replace(place, what="loop", nodes=nodes, heads=tree.max_depth), loop, loop.ready)


def profile(asked: argparse.Namespace, loaded: dict[Model, Loaded], shape: Shape) -> None:
    """Write operators of a plain step and of one with a tree, for every dtype and setting, at the first context."""
    asked.out.mkdir(parents=True, exist_ok=True)
    for model, one in loaded.items():
        wanted = PROFILED[one.backbone.device.type]
        nodes = max((n for n in asked.nodes if n <= wanted), default=min(asked.nodes))
        context = Context(one.backbone, asked.contexts[0], 1, nodes)
        for name, tree in (("plain", Tree.empty()), (f"tree{nodes}", tree_of(nodes, HEADS))):
            path = asked.out / f"profile-{shape.name}-{model.dtype}-{model.setting}-{name}.txt"
            path.write_text(profile_step(context.step(tree), one.backbone.device) + "\n", encoding="utf-8")
            print(f"wrote {path}", flush=True)


def measure_shape(shape: Shape, asked: argparse.Namespace, device: torch.device, rates: Rates) -> Iterator[list[Row]]:
    """The rows of one shape, a batch and context at a time."""
    itemsizes = {dtype: getattr(torch, dtype).itemsize for dtype in asked.dtypes}
    for models, obstacle in list(models_together(shape, asked, device)):
        if obstacle:
            yield [_unmeasured(shape, models[0], obstacle)]
            continue
        loaded: dict[Model, Loaded] = {}
        for model in models:
            try:
                with on_threads(max(asked.threads)):
                    loaded[model] = shape.load(model, device)
            except Unusable as error:
                yield [_unmeasured(shape, model, str(error))]
        if asked.profile:
            with on_threads(max(asked.threads)):
                profile(asked, loaded, shape)
        for batch in asked.batch:
            for context in asked.contexts:
                cases = cases_of(shape, loaded, asked, Point(shape.name, "", 0, context, batch, "step"))
                take_turns([case for case in cases if case.call], device, asked.seconds)
                free(cases)
                release_memory()
                yield rows_of(cases, shape.sizes, rates, itemsizes)
        del loaded
        if any(model.setting == "compiled" for model in models):
            torch.compiler.reset()  # it holds on to what it has compiled, weights and all
        release_memory()


def _unmeasured(shape: Shape, model: Model, obstacle: str) -> Row:
    return Row(Point(shape.name, model.dtype, 0, 0, 0, "step", setting=model.setting), obstacle=obstacle)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything that was asked for, and write it down."""
    quiet_libraries()
    machine = facts(__file__, arguments)
    asked = parse_arguments(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if line := warning(machine):
        print(line, flush=True)
    rates = measure_rates(device, asked.dtypes, min(2.0, asked.seconds / 4))
    print(f"reads {rates.bandwidth / 1e9:,.1f} GB/s", flush=True)
    rows: list[Row] = []
    text = ""
    for name in asked.shapes:
        for found in measure_shape(Shape.of(name), asked, device, rates):
            rows += found
            text = write_report(asked.out, machine, rates, rows)
            print(f"{name}: {len(rows)} rows", flush=True)
    print(text)
    for line in goal_lines(machine, rows):
        print(line)
    print(f"wrote {asked.out}/decode.md, decode.json")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is made here or lies here
    sys.exit(main())
