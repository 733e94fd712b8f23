"""What heads over a reduced draft vocabulary gain and lose on the embedded tiny backbone, in one command.

    python benchmarks/draft_vocab.py                                   # four trainings, eight times the tiny bench
    python benchmarks/draft_vocab.py --epochs 1 --only full 256        # two of the sizes, half of the steps
    python benchmarks/draft_vocab.py --set medusa_share_lm_head=true --out runs/benchmarks/draft_vocab-shared

Trains `configs/tiny_m1.yaml` with every size of `medusa_vocab_size`, decodes the same questions with each run, and
times what it takes to propose. Writes draft_vocab.json and .md to `--out`, after every piece: what is finished is not
done again, and a training that was stopped goes on. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the sibling modules, and the package where it is not installed

from m2_vs_m1 import Stage, finished, keep, train  # noqa: E402

from medusa_train.cli.common import quiet_libraries  # noqa: E402

FULL = "full"
SIZES = (FULL, "1024", "512", "256")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/draft_vocab"), metavar="DIR", help="results")
    parser.add_argument("--config", default="configs/tiny_m1.yaml", help="what is trained")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="N", help="vocabularies; full: all tokens")
    parser.add_argument("--only", nargs="+", metavar="N", help="train and measure these of them now; default: all")
    parser.add_argument("--epochs", type=float, default=2, help="passes over the data")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="in every training")
    parser.add_argument("--bench", default="tiny", help="of medusa-eval")
    parser.add_argument("--limit", type=int, help="questions at most; default: all")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--dtype", default="float32", help="that proposing is timed in; steps are counted in float32")
    parser.add_argument("--rounds", type=int, default=300, help="proposals of each run that are timed, in turns")
    asked = parser.parse_args(arguments)
    asked.only = asked.only or list(asked.sizes)
    for size in asked.sizes:
        if size != FULL and not size.isdigit():
            parser.error(f"--sizes: {size} is neither {FULL} nor a number")
    if unknown := [size for size in asked.only if size not in asked.sizes]:
        parser.error(f"--only: {', '.join(unknown)} is none of --sizes {' '.join(asked.sizes)}")
    return asked


def stage(asked: argparse.Namespace, size: str) -> Stage:
    """The training of a vocabulary of `size` tokens."""
    known = () if size == FULL else (f"medusa_vocab_size={size}",)
    return Stage(size, asked.config, (f"num_epochs={asked.epochs:g}", *asked.set, *known))


def measured(asked: argparse.Namespace, size: str, which: str, tree: Any) -> dict[str, Any]:
    """Steps of the run of `size` on the bench with a tree, `which` being its name; from the disk where they are."""
    path = asked.out / "cases" / f"{size}.{which}.json"
    training = stage(asked, size)
    settings = {
        "training": [training.config, *training.overrides],
        **{name: getattr(asked, name) for name in ("bench", "limit", "max_new_tokens")},
        "tree": [list(node) for node in tree.paths],
    }
    found = finished(path, settings)
    if found is None:
        from draft_vocab_case import decode_bench  # torch comes with it

        print(f"decoding {asked.bench} with {size} tokens and the {which} tree of {tree.size} nodes", flush=True)
        counts = decode_bench(asked.out / "runs" / size, tree, settings)
        found = {"settings": settings, "nodes": tree.size, **counts}
        keep(path, found)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure what is not yet done, and write the report after every run."""
    asked = parse_arguments(arguments)
    quiet_libraries()  # works only before they are imported
    results: dict[str, dict[str, Any]] = {}
    for size in asked.sizes:
        if size in asked.only:
            train(stage(asked, size), asked.out)
        elif not (asked.out / "runs" / f"{size}.json").is_file():
            continue
        from draft_vocab_case import coverages, equal_tree, own_tree, time_proposals
        from draft_vocab_report import write_report

        run = asked.out / "runs" / size
        result = {"own": measured(asked, size, "own", own_tree(run)), **coverages(run)}
        if (tree := equal_tree(asked.out / "runs" / FULL)) is not None:
            result["equal"] = measured(asked, size, "equal", tree)
        results[size] = result
        times = time_proposals([asked.out / "runs" / name for name in results], tree, asked.dtype, asked.rounds)
        for name, milliseconds in times.items():
            results[name]["propose_ms"] = milliseconds
        write_report(asked.out, results, asked.dtype, __file__, arguments)
    if FULL not in results:
        print(f"no run of {FULL}, whose tree is the equal one: measured with each run's own tree only")
    print(f"report: {asked.out / 'draft_vocab.md'}")


if __name__ == "__main__":
    main()
