"""Steps, coverage and latencies of finished runs of `draft_vocab.py`. Trains nothing and writes nothing."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from clock import Clock
from rich.console import Console

from medusa_train.checkpoint.heads import load_draft, read_heads
from medusa_train.checkpoint.load import load_with_draft
from medusa_train.checkpoint.resolve import heads_files, resolve_model
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.data.conversation import Message
from medusa_train.data.draft_vocabulary import coverage, token_counts
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.evaluation.questions import load_bench
from medusa_train.inference.generate import Decoder
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.features import Features
from medusa_train.training.load_data import load_data
from medusa_train.trees.tree import Tree

WARMUP = 5


def own_tree(run: Path) -> Tree:
    """The tree that the run chose for this machine; the chain of its heads' first guesses where it chose none."""
    path = run / "tree.json"
    return Tree.load(path) if path.is_file() else Tree.chain(read_heads(run / "heads").num_heads)


def equal_tree(run: Path) -> Tree | None:
    """One tree for all runs: that of the last checkpoint of `run`, fitted to its held-out text; None: no such run."""
    path = CheckpointStore(run).latest() if run.is_dir() else None
    return Tree.load(path / "tree.json") if path is not None and (path / "tree.json").is_file() else None


def decode_bench(run: Path, tree: Tree, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Decode a bench greedily in float32, one answer at a time.

    Returns:
        `answers`: by question, tokens that steps brought and steps. `coverage`: share of these tokens that the heads
        know.
    """
    paths = resolve_model(str(run), None, None)
    subject = load_with_draft(paths, "float32", pack=False)
    assert isinstance(subject.draft, MedusaDraft)
    chat = ChatEncoder(subject.backbone.tokenizer, paths.chat_template)
    decoder = Decoder(subject.backbone, subject.draft, tree)
    counts: dict[str, list[int]] = {}
    said = torch.zeros(subject.backbone.vocab_size, dtype=torch.long)
    for question in load_bench(settings["bench"]).limited(settings["limit"]).questions:
        history: list[Message] = []
        sums = counts.setdefault(str(question.question_id), [0, 0])
        for text in question.turns:
            prompt = chat.prompt([*history, Message("user", text)])
            if len(prompt) + settings["max_new_tokens"] > subject.backbone.max_context:
                break
            made = decoder.generate(prompt, settings["max_new_tokens"])
            sums[0] += len(made.tokens) - 1
            sums[1] += made.steps
            said += torch.bincount(torch.tensor(made.tokens[1:], dtype=torch.long), minlength=len(said))
            answer = subject.backbone.tokenizer.decode(made.tokens, skip_special_tokens=True).strip()
            if not answer:
                break
            history += [Message("user", text), Message("assistant", answer)]
    return {"answers": counts, "coverage": _covered(said, subject.draft.token_map)}


def coverages(run: Path) -> dict[str, Any]:
    """Shares of the tokens to be learnt and of those held out that the heads know, and the bytes of the heads."""
    data = load_data(load_config(TrainConfig, run / "config.yaml"), Console(file=io.StringIO()))
    heads = read_heads(run / "heads")
    size = int(max(example.tokens.max() for example in (*data.train.examples, *data.validation.examples))) + 1
    if heads.token_map is not None:
        size = max(size, int(heads.token_map.max()) + 1)
    return {
        "coverage_train": _covered(token_counts(data.train, size), heads.token_map),
        "coverage_held_out": _covered(token_counts(data.validation, size), heads.token_map),
        "bytes": sum(path.stat().st_size for path in heads_files(run / "heads")),
    }


def _covered(counts: torch.Tensor, token_map: torch.Tensor | None) -> float:
    return 1.0 if token_map is None else coverage(counts, token_map)


@torch.inference_mode()
def time_proposals(runs: Sequence[Path], tree: Tree | None, dtype: str, rounds: int) -> dict[str, float]:
    """Median milliseconds of a proposal of each run's heads, laid out as for decoding, all taking turns.

    Args:
        runs: of one backbone. tree: what is proposed; None: the chain of the first run's heads.
    """
    subject = load_with_draft(resolve_model(str(runs[0]), None, None), dtype)
    backbone = subject.backbone
    drafts = [load_draft(run / "heads", backbone) for run in runs]
    for draft in drafts:
        draft.prepack()
    tree = (tree or Tree.chain(drafts[0].num_heads)).to(backbone.device)
    tokens = torch.zeros(1, 1, dtype=torch.long, device=backbone.device)
    torch.manual_seed(0)
    feats = Features(torch.randn(1, 1, backbone.hidden_size, device=backbone.device).to(backbone.dtype))
    states = [draft.start(feats, tokens, [1], backbone.new_cache(1)) for draft in drafts]
    clock = Clock(backbone.device)
    seen: list[list[float]] = [[] for _ in drafts]
    for turn in range(rounds + WARMUP):
        for place in range(len(drafts)):
            i = (place + turn) % len(drafts)
            took = clock.seconds(lambda i=i: drafts[i].propose(states[i], tokens[0], tree))  # type: ignore[misc]
            if turn >= WARMUP:
                seen[i].append(1000 * took)
    return {run.name: statistics.median(times) for run, times in zip(runs, seen, strict=True)}
