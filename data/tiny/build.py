"""Build the embedded test model: train a byte-level BPE and an 11M-parameter Llama, write both
beside this file.

    python data/tiny/build.py --gsm8k train.jsonl     # an hour or two on two CPU cores

The text is GSM8K's training problems and the documented functions of the running Python's standard
library (the shipped model used Python 3.11.7).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

HERE = Path(__file__).resolve().parent
# the modules beside this file, also when it is imported from elsewhere
sys.path.insert(0, str(HERE))

from chats import save_tokenizer, train_tokenizer  # noqa: E402
from corpus import Corpus, Item, is_held_out, read_items, single_turn  # noqa: E402
from training import Recipe, TrainingRun, save_model  # noqa: E402
from unlikelihood import fine_tune  # noqa: E402


def build(items: Sequence[Item], recipe: Recipe, out: Path) -> None:
    """Train the tokenizer and the model on `items` and write both to `out`."""
    rng = Random(f"tokenizer {recipe.seed}")
    texts = ["\n".join(single_turn(item, rng)) for item in items if not is_held_out(item)]
    tokenizer = train_tokenizer(texts, recipe.vocabulary)
    corpus = Corpus(items, tokenizer, recipe.seed)
    run = TrainingRun(recipe, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    held_out = ", ".join(f"{len(items)} {kind}" for kind, items in corpus.held_out.items())
    parameters = sum(p.numel() for p in run.model.parameters())
    print(
        f"{len(corpus.short)} documents, held out: {held_out}; {parameters:,} parameters on"
        f" {run.device}",
        flush=True,
    )
    run.train(corpus)
    run.print_held_out_losses(corpus)
    fine_tune(run, corpus)
    run.print_held_out_losses(corpus)
    save_tokenizer(tokenizer, out)
    save_model(run.model, out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gsm8k", type=Path, metavar="FILE", help="GSM8K's train.jsonl (default: from the hub)"
    )
    parser.add_argument(
        "--out", type=Path, default=HERE, metavar="DIR", help="model directory (default: data/tiny)"
    )
    arguments = parser.parse_args()
    build(read_items(arguments.gsm8k), Recipe(), arguments.out)
    print(f"model written to {arguments.out}")


if __name__ == "__main__":
    main()
