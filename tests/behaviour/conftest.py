"""A model, chats, and a short run of each draft, made once for all tests of behaviour."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.behaviour import plain, world
from tests.behaviour.world import (
    NARROW,
    QUICK,
    as_yaml,
    make_chats,
    read_lines,
    write_lines,
    write_model,
    write_tree,
)

#: Settings of each kind of draft, as keys of medusa-train: small, and none at its default.
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {"medusa_num_heads": 3, "medusa_num_layers": 2, "medusa_decay_coefficient": 0.7},
    "medusa-soft": {"medusa_num_heads": 3, "medusa_soft_targets": 0.6},
    "medusa-markov": {
        "medusa_num_heads": 3,
        "medusa_markov_rank": 4,
        "medusa_share_lm_head": True,
    },
    "medusa-reduced": {
        "medusa_num_heads": 2,
        "medusa_vocab_size": 16,
        "medusa_soft_targets": 0.5,
    },
    "hydra": {
        "draft": "hydra",
        "hydra.num_heads": 3,
        "hydra.num_layers": 2,
        "hydra.prefix_layer": False,
        "hydra.dropout": 0.0,
        "hydra.decay_coefficient": 0.9,
        "hydra.soft_targets": 0.0,
        "hydra.normalize_embeddings": False,
    },
    "hydra++": {
        "draft": "hydra",
        "hydra.num_heads": 3,
        "hydra.num_layers": 1,
        "hydra.dropout": 0.0,
    },
    "amphista": {
        "draft": "amphista",
        "amphista.num_heads": 3,
        "amphista.alignment_weight": 0.3,
        "amphista.label_weight": 0.9,
    },
    "kangaroo": {"draft": "kangaroo", "kangaroo.num_heads": 3, "kangaroo.exit_layer": 1},
    "kangaroo-mlp": {
        "draft": "kangaroo",
        "kangaroo.num_heads": 3,
        "kangaroo.exit_layer": 2,
        "kangaroo.mlp_size": 24,
        "kangaroo.attention": False,
        "kangaroo.share_lm_head": False,
    },
    "eagle3": {
        "draft": "eagle3",
        "eagle3.num_heads": 3,
        "eagle3.train_steps": 3,
        "eagle3.decay_coefficient": 0.7,
    },
    "eagle3-reduced": {
        "draft": "eagle3",
        "eagle3.num_heads": 3,
        "eagle3.train_steps": 2,
        "eagle3.vocab_size": 40,
        "eagle3.soft_targets": 0.5,
    },
    "dflash": {
        "draft": "dflash",
        "dflash.max_draft_tokens": 3,
        "dflash.num_layers": 2,
        "dflash.window": 7,
        "dflash.decay_coefficient": 0.8,
        "dflash.soft_targets": 0.3,
    },
}
#: The loss that each of them minimizes on a frozen model.
LOSSES: dict[str, plain.HeadsLoss] = {
    "medusa": plain.HeadsLoss(0.7),
    "medusa-soft": plain.HeadsLoss(0.8, 0.6),
    "medusa-markov": plain.HeadsLoss(0.8),
    "medusa-reduced": plain.HeadsLoss(0.8, 0.5),
    "hydra": plain.HeadsLoss(0.9, 0.0),
    "hydra++": plain.HeadsLoss(1.0, 1.0),
    "amphista": plain.HeadsLoss(1.0, 0.25, 1.2),
    "kangaroo": plain.HeadsLoss(1.0, 1.0),
    "kangaroo-mlp": plain.HeadsLoss(1.0, 1.0),
    "eagle3": plain.HeadsLoss(0.7, 1.0),
    "eagle3-reduced": plain.HeadsLoss(0.8, 0.5),
    "dflash": plain.HeadsLoss(0.8, 0.3, 1 / (0.8 + 0.8**2 + 0.8**3)),
}


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key of the machine reaches a test."""
    for name in list(os.environ):
        if name.endswith(("_API_KEY", "_TOKEN")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers with its tokenizer."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> PreTrainedTokenizerFast:
    fast: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(model)
    return fast


@pytest.fixture(scope="session")
def exact_model(model: Path) -> Any:
    """The same model in float64, by transformers."""
    return plain.load_model(model)


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six chats of one or two turns."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    return write_lines(path, ({"messages": chat} for chat in make_chats(6)))


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five other chats."""
    path = tmp_path_factory.mktemp("data") / "held_out.jsonl"
    return write_lines(path, ({"messages": chat} for chat in make_chats(5, seed=2)))


@pytest.fixture(scope="session")
def documents(
    chats: Path, held_out: Path, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[plain.Document], list[plain.Document]]:
    """Both files as ids and masks, by `world.TEMPLATE` written out."""
    first, second = (
        [document(record["messages"], tokenizer) for record in world.read_lines(path)]
        for path in (chats, held_out)
    )
    return first, second


def document(
    messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerFast
) -> plain.Document:
    """Tokenize a chat turn by turn; answers and their end tokens are supervised."""
    tokens, supervised = [world.BOS], [False]
    for message in messages:
        content = tokenizer(message["content"], add_special_tokens=False)["input_ids"]
        if message["role"] == "assistant":
            tokens += [world.ASSISTANT, *content, world.EOS]
            supervised += [False, *[True] * (len(content) + 1)]
        else:
            tokens += [{"user": world.USER, "system": world.SYSTEM}[message["role"]], *content]
            supervised += [False] * (len(content) + 1)
    return plain.Document(tokens, supervised)


RunOf = Callable[..., Path]


@pytest.fixture(scope="session")
def run_of(
    model: Path, chats: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunOf:
    """Return a run of a kind of draft with further keys, trained on all chats at once in every of
    three steps, and evaluated on the others; the same directory for the same keys.
    """
    runs: dict[str, Path] = {}

    def run(kind: str, **keys: Any) -> Path:
        name = f"{kind} {sorted(keys.items(), key=str)}"
        if name not in runs:
            out = tmp_path_factory.mktemp("run") / kind
            settings = {**KINDS[kind], **keys}
            written = world.training_keys(model, chats, out, **whole_batches(held_out))
            words = [f"{key}={as_yaml(value)}" for key, value in settings.items()]
            written = {key: value for key, value in written.items() if key not in settings}
            world.train(*words, **written).ok()
            runs[name] = out
        return runs[name]

    return run


def whole_batches(held_out: Path) -> dict[str, Any]:
    """Return keys that make each step one over all six chats."""
    return {
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "max_steps": 3,
        "adam_epsilon": 1e-3,
        "val_set_size": None,
        "test_datasets": [{"path": str(held_out)}],
    }


@pytest.fixture(scope="session")
def own(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats with the model's own greedy answers, by medusa-selfdistill."""
    return answered(model, tmp_path_factory.mktemp("own"))


def answered(model: Path, where: Path) -> Path:
    """Let a model answer eight chats, greedily; return the file."""
    prompts = [{"messages": chat} for chat in make_chats(8, seed=3, turns=1)]
    words = ["--prompts", write_lines(where / "prompts.jsonl", prompts), "--model", model]
    settings = {"temperature": 0, "dtype": "float32", "max_new_tokens": 32}
    settings |= {"drop_truncated": False, "drop_looping": False, "output": where / "own.jsonl"}
    world.selfdistill(*words, **settings).ok()
    return where / "own.jsonl"


def train_long(kind: str, model: Path, data: Path, out: Path) -> Path:
    """Train a kind of draft until it guesses a model's answers to `data` often."""
    keys = world.training_keys(model, data, out, micro_batch_size=8, max_steps=50)
    keys |= {"lr_scheduler": "constant", "logging_steps": 50, "learning_rate": 1e-2, **KINDS[kind]}
    world.train(**keys).ok()
    return out


@pytest.fixture(scope="session")
def skilled(
    model: Path, own: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a run of a kind of draft that guesses the model's answers to `own` often."""
    runs: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in runs:
            out = tmp_path_factory.mktemp("skilled") / kind
            runs[kind] = train_long(kind, model, own, out)
        return runs[kind]

    return run


@pytest.fixture(scope="session")
def bench(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five questions of two categories; two have a second turn, one a system message."""
    texts = [record["messages"][0]["content"] for record in read_lines(own)]
    questions: list[dict[str, Any]] = [
        {"question_id": 11, "category": "known", "turns": [texts[0]]},
        {"question_id": 12, "category": "known", "turns": [texts[1], "one more"]},
        {"question_id": "x", "category": "new|er", "turns": ["two red"], "system": "five"},
        {"question_id": 14, "category": "known", "turns": [texts[2]]},
        {"question_id": 15, "category": "new|er", "turns": ["large", "nine nine"]},
    ]
    return write_lines(tmp_path_factory.mktemp("bench") / "questions.jsonl", questions)


@pytest.fixture(scope="session")
def tree_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("tree") / "narrow.json", NARROW)


@pytest.fixture(scope="session")
def evaluated(
    skilled: Callable[[str], Path], bench: Path, tree_file: Path, tmp_path_factory: Any
) -> Path:
    """The report of Medusa heads on the bench, with answers compared in both dtypes."""
    out = tmp_path_factory.mktemp("evaluated") / "report"
    words = ["--bench", bench, "--model", skilled("medusa"), "--tree", tree_file]
    world.evaluate(*words, **QUICK | {"exactness": True}, output_dir=out).ok()
    return out
