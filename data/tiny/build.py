"""Build the embedded tiny backbone: real text in, a Hugging Face model directory out.

    python data/tiny/build.py --gsm8k train.jsonl     # 60 to 90 minutes on two CPU cores, minutes on a GPU

Reads GSM8K's training problems and the documented functions of this Python's standard library, trains a byte-level
BPE and an 11M-parameter Llama on chats made of them, and writes both beside this file, with a README that says what
came out. Interrupted, the same command goes on from the last checkpoint under `--work` (another `--steps` re-plans
the rest of the schedule).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the sibling modules, also when this file is imported from elsewhere

import corpus  # noqa: E402
from corpus import Item  # noqa: E402

if TYPE_CHECKING:
    from library import Library
    from recipe import Recipe
    from transformers import LlamaForCausalLM


PLAN = ("steps", "polish_rounds", "polish_rate", "polish_requests")  # what may change when a run goes on


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train the embedded tiny backbone and write it as a Hugging Face directory. "
        "Interrupted, the same command goes on from its last checkpoint.",
        formatter_class=Help,
    )
    parser.add_argument(
        "--gsm8k",
        type=Path,
        metavar="FILE",
        help="GSM8K's train.jsonl; without it, openai/gsm8k from the hub",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where the finished model goes (default: beside this file)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("runs/tiny-build"), help="checkpoint, log and preview of a run"
    )
    parser.add_argument("--steps", type=int, default=2720, help="optimizer steps of about 7,500 tokens")
    parser.add_argument(
        "--polish", type=int, default=40, help="rounds after them in which its own greedy answers unlearn loops"
    )
    parser.add_argument("--every", type=int, default=120, help="steps between evaluations and checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the wording and the order")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, few documents, a few steps: does it run?")
    options = parser.parse_args(arguments)
    if options.out is None:
        options.out = options.work / "model" if options.smoke else HERE
    return options


def read_documents(arguments: argparse.Namespace) -> list[Item]:
    """All problems and functions; a few of each under `--smoke`. Test cases are left out: nobody asks for them."""
    problems = corpus.read_problems(arguments.gsm8k)
    root = None
    if arguments.smoke:
        import json as package

        root = Path(package.__file__).parent.parent / "email"
    functions = [f for f in corpus.read_functions(root) if not f.name.startswith("test")]
    return [*(problems[:200] if arguments.smoke else problems), *functions]


def go_on_or_refuse(work: Path, recipe: dict[str, object]) -> None:
    """Note the recipe in the work directory; refuse one that differs from the checkpoint's in more than its plan."""
    path = work / "recipe.json"
    if (work / "checkpoint.safetensors").exists() and path.exists():
        before = json.loads(path.read_text())
        changed = [key for key in recipe if key not in PLAN and before.get(key) != recipe[key]]
        if changed:
            raise SystemExit(
                f"{work} holds a run with another {', '.join(changed)}: choose another --work, or delete it"
            )
    work.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recipe, indent=2) + "\n")


def train(options: argparse.Namespace, recipe: Recipe, library: Library) -> None:
    """Train, or go on training; the state after every evaluation stands in `--work`, loadable as `preview/`."""
    import torch
    from polish import polish, settle
    from training import Run, save_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(recipe, options.work / "checkpoint.safetensors", device)
    if run.step < recipe.steps and not options.smoke and (device.type == "cuda" or shutil.which("g++")):
        run.model.model.compile(dynamic=True)  # a tenth faster on a CPU
    held_out = library.held_out_chats()
    print(
        f"{len(library.short)} short and {len(library.long)} long training documents, "
        f"{', '.join(f'{len(chats)} {kind}' for kind, chats in held_out.items())} held out; "
        f"{sum(p.numel() for p in run.model.parameters()):,} parameters on {device}; from step {run.step}",
        flush=True,
    )

    def log(entry: dict[str, object]) -> None:
        line = json.dumps({"time": time.strftime("%H:%M:%S"), **entry})
        print(line, flush=True)
        with (options.work / "log.jsonl").open("a") as file:
            file.write(line + "\n")

    def show(model: LlamaForCausalLM) -> None:
        save_model(model, options.work / "preview")

    seed = options.seed
    run.train(
        lambda number: library.epoch(seed, number),
        lambda number: library.brief_epoch(seed, number),
        held_out,
        log,
        options.every,
        show,
    )
    polish(
        run,
        library.tokenizer,
        lambda number: library.requests(recipe.polish_requests, Random(f"requests {seed} {number}")),
        lambda number: library.brief_epoch(seed, 10_000 + number),
        held_out,
        log,
        max(1, options.every // 6),  # a round takes as long as several steps
        show,
    )
    settle(run)
    save_model(run.model, options.out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, or go on building."""
    options = parse_arguments(arguments)
    items = read_documents(options)

    from library import Library
    from recipe import Recipe
    from report import write_readme
    from vocabulary import save_tokenizer, train_tokenizer

    recipe = Recipe(steps=options.steps, polish_rounds=options.polish, seed=options.seed)
    if options.smoke:
        recipe = dataclasses.replace(
            recipe,
            hidden=64,
            head_dim=32,
            layers=2,
            intermediate=96,
            vocabulary=512,
            micro_batch=1024,
            polish_requests=8,
        )
    rng = Random(f"tokenizer {options.seed}")
    texts = ["\n".join(corpus.single_turn(item, rng)) for item in items if not corpus.is_held_out(item)]
    tokenizer = train_tokenizer(texts, recipe.vocabulary)
    library = Library(items, tokenizer)

    go_on_or_refuse(options.work, dataclasses.asdict(recipe))
    for directory in (options.work / "preview", options.out):
        save_tokenizer(tokenizer, directory)
    try:
        train(options, recipe, library)
    except KeyboardInterrupt:
        print(
            f"interrupted; the same command goes on from the last checkpoint in {options.work}",
            file=sys.stderr,
        )
        return 130
    write_readme(options.out, recipe, library, options.work / "log.jsonl")
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
