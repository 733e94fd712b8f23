"""A small random Llama with a tokenizer, chats to train on, and configurations of short runs."""

import io
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from medusa_train.config.schema import TrainConfig
from medusa_train.training.stages import train_stages
from medusa_train.training.trainer import Trainer
from medusa_train.tree_search.time_steps import Effort
from tests.families import random_model

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation"
    " %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}<|user|>{{ m.content }}{% endif"
    " %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "red",
    "green",
    "blue",
    "large",
]


#: Joint training with dropout and the teacher on.
LORA: dict[str, Any] = {
    "recipe": "medusa2",
    "adapter": "lora",
    "lora_target_linear": True,
    "lora_r": 4,
    "lora_dropout": 0.2,
    "medusa_self_distillation": True,
    "learning_rate": 1e-2,
    "medusa_lr_multiplier": 2.0,
}


def sentence(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 9)))


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    draw = random.Random(0)
    tokenizer.train_from_iterator([sentence(draw) for _ in range(200)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="session")
def target_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random two-layer Llama (d 32, V 300) whose answers vary."""
    where = tmp_path_factory.mktemp("backbone")
    tokenizer = build_tokenizer()
    assert len(tokenizer) == 300
    shape = {
        "vocab_size": 300,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "pad_token_id": None,
    }
    random_model("llama", std=0.3, **shape, bos_token_id=0, eos_token_id=1).save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty chats of one or two turns, in ShareGPT form."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    draw = random.Random(1)
    lines = []
    for number in range(40):
        turns = []
        for _ in range(draw.randint(1, 2)):
            turns.append({"from": "human", "value": sentence(draw)})
            turns.append({"from": "gpt", "value": sentence(draw)})
        lines.append(json.dumps({"id": f"chat-{number}", "conversations": turns}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def base_keys(target_model_dir: Path, chats: Path) -> dict[str, object]:
    """Keys of a run of six steps in float32, all but `output_dir`."""
    return {
        "base_model": str(target_model_dir),
        "datasets": [{"path": str(chats), "type": "sharegpt"}],
        "medusa_num_heads": 3,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "medusa_lr_multiplier": 1.0,
        "warmup_steps": 0,
        "logging_steps": 1,
        "val_set_size": 0.2,
        "bf16": False,
        "calibration_tokens": 0,
    }


@pytest.fixture
def make_config(base_keys: dict[str, object], tmp_path: Path):
    """Build the configuration of a run in the test's directory from `base_keys` and further keys."""

    def make(**keys: object) -> TrainConfig:
        return TrainConfig(**{**base_keys, "output_dir": str(tmp_path / "run"), **keys})

    return make


@pytest.fixture(autouse=True)
def short_latency_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time every tree on 8 tokens and one round: which tree is chosen does not matter to these
    tests.
    """
    monkeypatch.setattr("medusa_train.tree_search.time_steps.TIMED_TOKENS", 8)
    for effort in ("QUICK", "THOROUGH"):
        monkeypatch.setattr(f"medusa_train.tree_search.choose_tree.{effort}", Effort(1, 8))


@pytest.fixture
def console() -> Console:
    """A console that writes to a string, `.file.getvalue()`."""
    return Console(
        file=io.StringIO(), width=200, markup=False, highlight=False, soft_wrap=True, emoji=False
    )


def metrics(run: Path) -> list[dict]:
    """Read the records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def figures(run: Path) -> list[dict[str, Any]]:
    """The records of a run without times."""
    return [
        {k: v for k, v in record.items() if k not in ("time", "tokens_per_s")}
        for record in metrics(run)
    ]


def train(cfg: TrainConfig, console: Console) -> int:
    """Train with everything printed to `console`."""
    return train_stages(cfg, console, console)


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT) -> None:
    """Send the signal in the middle of that step, as a user would."""
    real = Trainer.loss_and_gradients

    def loss_and_gradients(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if self.state.step + 1 == step:
            monkeypatch.setattr(Trainer, "loss_and_gradients", real)
            os.kill(os.getpid(), number)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "loss_and_gradients", loss_and_gradients)
