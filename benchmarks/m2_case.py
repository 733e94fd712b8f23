"""What a finished run of `m2_vs_m1.py` amounts to: steps, quality of the backbone, tokens learnt. Trains nothing."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.load import load_with_draft
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.load import load_config
from medusa_train.config.schema import DatasetConfig, TrainConfig
from medusa_train.data.conversation import Message
from medusa_train.data.dataset import BatchLoader, EncodedDataset, load_datasets
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.evaluation.backbone_quality import Quality, compare, load_versions
from medusa_train.evaluation.questions import load_bench
from medusa_train.inference.generate import Decoder
from medusa_train.trees.tree import Tree

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data" / "tiny"))

from corpus import Problem, clean_answer, is_held_out  # type: ignore[import-not-found]

Counts = dict[str, list[int]]  # by question: tokens that steps brought, steps
FIGURES = (
    "acceleration_rate",
    "overhead",
    "speedup",
    "speedup_over_generate",
    "tokens_per_s",
    "baseline_tokens_per_s",
    "generate_tokens_per_s",
    "answers",
    "equal_answers",
    "tie_answers",
    "looping_answers",
)


def measure(out: Path, stages: Sequence[str], case: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that the report says of a case whose stages are trained and whose bench is decoded."""
    runs = [out / "runs" / stage for stage in stages]
    report = json.loads((out / "eval" / case / "report.json").read_text(encoding="utf-8"))
    overall, meta = report["overall"], report["meta"]
    return {
        "decoding": {
            **{name: overall[name] for name in FIGURES},
            **{name: meta[name] for name in ("dtype", "tree_nodes", "device", "threads", "torch", "date")},
        },
        "answers": _own_tree(out / "eval" / case / "answers.jsonl"),
        "equal_tree": _equal_tree(runs[-1], settings),
        "training": [training(run) for run in runs],
        "held_out": [line for line in _metrics(runs[-1]) if line["kind"] == "eval"][-1],
        "quality": {name: asdict(quality) for name, quality in _quality(runs[-1], out, settings).items()},
    }


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def training(run: Path) -> dict[str, Any]:
    """Tokens of all kinds that went through the heads, steps, seconds of these steps alone, and the usual speed.

    The speed is the median over what was logged, so that a pause of the machine does not count.
    """
    logged = [line for line in _metrics(run) if line["kind"] == "train"]
    seconds, done = 0.0, 0
    for line in logged:
        seconds, done = seconds + (line["tokens"] - done) / line["tokens_per_s"], line["tokens"]
    usual = statistics.median(line["tokens_per_s"] for line in logged)
    return {"run": run.name, "steps": logged[-1]["step"], "tokens": done, "seconds": seconds, "tokens_per_s": usual}


def _own_tree(answers: Path) -> Counts:
    """What medusa-eval counted, with the tree that was chosen for this run on this machine."""
    counts: Counts = {}
    for line in map(json.loads, answers.read_text(encoding="utf-8").splitlines()):
        if not line.get("skipped"):
            _add(counts, line["question_id"], line["tokens"], line["steps"])
    return counts


def _equal_tree(run: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Steps in float32 with a tree of a size that is the same for all runs: the last checkpoint's.

    The run's own tree has the size that was fastest when it was timed, so a rate may be higher for a larger tree
    alone.
    """
    path = CheckpointStore(run).latest()
    assert path is not None
    tree = Tree.load(path / "tree.json")
    paths = resolve_model(str(run), None, path / "tree.json")
    subject = load_with_draft(paths, "float32")
    chat = ChatEncoder(subject.backbone.tokenizer, paths.chat_template)
    decoder = Decoder(subject.backbone, subject.draft, tree)
    counts: Counts = {}
    for question in load_bench(settings["bench"]).limited(settings["limit"]).questions:
        history: list[Message] = []
        for text in question.turns:
            prompt = chat.prompt([*history, Message("user", text)])
            if len(prompt) + settings["max_new_tokens"] > subject.backbone.max_context:
                break
            made = decoder.generate(prompt, settings["max_new_tokens"])
            _add(counts, question.question_id, len(made.tokens), made.steps)
            answer = subject.backbone.tokenizer.decode(made.tokens, skip_special_tokens=True).strip()
            if not answer:
                break
            history += [Message("user", text), Message("assistant", answer)]
    return {"nodes": tree.size, "answers": counts}


def _add(counts: Counts, question: int | str, tokens: int, steps: int) -> None:
    before = counts.setdefault(str(question), [0, 0])
    counts[str(question)] = [before[0] + tokens - 1, before[1] + steps]


def _quality(run: Path, out: Path, settings: dict[str, Any]) -> dict[str, Quality]:
    """The backbone before and after the run, on the text that was held out from it and on GSM8K; float32."""
    cfg = load_config(TrainConfig, run / "config.yaml")
    paths = resolve_model(str(run), None, None)
    before, after = load_versions(paths, cfg.base_model)
    encoder = ChatEncoder(_tokenizer(cfg.base_model), cfg.chat_template)
    cfg = cfg.model_copy(update={"sample_packing": False, "dataset_prepared_path": None})
    problems = _gsm8k(settings["gsm8k"], settings["problems"], out / "gsm8k.jsonl")
    entry = DatasetConfig(path=str(problems), type="messages")
    texts = {
        "held-out answers": load_datasets(cfg, encoder)[1],
        "GSM8K": load_datasets(cfg.model_copy(update={"datasets": [entry], "val_set_size": 0.0}), encoder)[0],
    }
    return {name: compare(before, after, _batches(text)) for name, text in texts.items() if len(text)}


def _tokenizer(base_model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base_model)


def _batches(text: EncodedDataset) -> Iterable[Any]:
    loader = BatchLoader(text, micro_batch_size=8, seed=0, shuffle=False)
    return itertools.islice(loader, loader.steps_per_epoch)


def _gsm8k(source: str, most: int, path: Path) -> Path:
    """Write GSM8K problems that the tiny backbone did not learn from to `path`, as chats worded like its own."""
    if source == "hub":
        from datasets import load_dataset

        rows = list(load_dataset("openai/gsm8k", "main", split="test"))
    else:
        rows = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    problems = [Problem(" ".join(row["question"].split()), clean_answer(row["answer"])) for row in rows]
    if source != "hub":
        problems = [problem for problem in problems if is_held_out(problem)]
    lines = [
        {"messages": [{"role": "user", "content": p.question}, {"role": "assistant", "content": p.answer}]}
        for p in problems[:most]
    ]
    if not lines:
        raise SystemExit(f"{source}: no problem of it was held out from the tiny backbone")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
