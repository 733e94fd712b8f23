"""A small world for the tests of behaviour: models, tokenizers, chats, and the public commands in
this process.

Nothing here imports more of the package than its commands.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = Path(__file__).parent / "fixtures"

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
BOS, EOS, USER, ASSISTANT, SYSTEM = range(len(SPECIAL))
#: The end token of an answer is a part of the assistant's turn alone.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = [
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("red", "green", "blue", "large"),
]
VOCABULARY = 300
CONTEXT = 256

#: Models as small as their families allow, by the name of their configuration.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-bias-tied": ("LlamaConfig", {"attention_bias": True, "tie_word_embeddings": True}),
    "mistral-window": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "phi3": ("Phi3Config", {}),
    "phi3-longrope": (
        "Phi3Config",
        {
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 20,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.0, 1.0, 1.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
                "original_max_position_embeddings": 20,
            },
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 4.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.25,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


# Models and tokenizers


def build_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 300 tokens: special ones, bytes, and parts of `WORDS`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    draw = random.Random(0)
    tokenizer.train_from_iterator([sentence(draw) for _ in range(200)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    if template is not None:
        fast.chat_template = template
    assert len(fast) == VOCABULARY
    return fast


def random_model(
    family: str = "llama", seed: int = 0, std: float = 0.3, **changes: Any
) -> PreTrainedModel:
    """Build a random model whose greedy text varies and is ASCII."""
    name, extra = FAMILIES[family]
    config = getattr(transformers, name)(**{**SHAPE, **extra, **changes})
    attention = "eager" if family == "gemma2" else "sdpa"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, std)
    return model.eval()


def write_model(directory: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write a random model with the tokenizer; bytes beyond ASCII are never its best token."""
    tokenizer = build_tokenizer()
    model = random_model(family, seed, **changes)
    printable = [token for token in range(VOCABULARY) if tokenizer.decode([token]).isascii()]
    others = sorted(set(range(VOCABULARY)) - set(printable))
    with torch.no_grad():
        model.get_output_embeddings().weight[others] = 0.0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


# Data


def sentence(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 9)))


def make_chats(count: int, seed: int = 1, turns: int = 2) -> list[list[dict[str, str]]]:
    """Return chats of one to `turns` questions and answers, as OpenAI messages."""
    draw = random.Random(seed)
    chats = []
    for _ in range(count):
        chat = []
        for _ in range(draw.randint(1, turns)):
            chat.append({"role": "user", "content": sentence(draw)})
            chat.append({"role": "assistant", "content": sentence(draw)})
        chats.append(chat)
    return chats


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """Write records as JSON Lines; text is written as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# Commands


@dataclass(frozen=True)
class Ran:
    """How a command ended: its exit code, and what it printed to each stream."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Both streams, with all white space as one space, since lines are wrapped."""
        return " ".join((self.out + "\n" + self.err).split())

    def ok(self) -> Ran:
        """Return itself; fail if the command did."""
        assert self.code == 0, f"exit code {self.code}\n{self.out}\n{self.err}"
        return self

    def fails(self, code: int, *words: str) -> Ran:
        """Return itself; fail unless it ended with `code` and printed all `words`."""
        assert self.code == code, f"exit code {self.code}, not {code}\n{self.out}\n{self.err}"
        self.says(*words)
        assert "medusa_train/" not in self.err or "Traceback" not in self.err, self.err
        return self

    def says(self, *words: str) -> Ran:
        """Return itself; fail unless all `words` were printed."""
        missing = [word for word in words if " ".join(word.split()) not in self.text]
        assert not missing, f"not printed: {missing}\n{self.out}\n{self.err}"
        return self


def command(name: str, *arguments: Any, **keys: Any) -> Ran:
    """Run `medusa-NAME` (train, eval, selfdistill or export) in this process.

    Args:
        arguments: words of the command line.
        keys: overrides, `key=value`; None leaves a key out.
    """
    module = {"eval": "evaluate"}.get(name, name)
    app = importlib.import_module(f"medusa_train.cli.{module}").app
    words = [str(argument) for argument in arguments]
    words += [f"{key}={as_yaml(value)}" for key, value in keys.items() if value is not None]
    with patch.object(sys, "argv", [f"medusa-{name}", *words]):
        result = CliRunner().invoke(app, words, catch_exceptions=False)
    return Ran(result.exit_code, result.stdout, result.stderr)


def as_yaml(value: Any) -> str:
    """Write a value as an override has it."""
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        return value
    text: str = yaml.safe_dump(value, default_flow_style=True, width=100_000)
    return text.removesuffix("\n").removesuffix("\n...")


class Clock:
    """A clock that goes on by one tick whenever the main thread reads it: what is timed takes as
    long every time.
    """

    tick = 0.01

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        if threading.current_thread() is threading.main_thread():
            self.now += self.tick
        return self.now


def train(*arguments: Any, **keys: Any) -> Ran:
    return command("train", *arguments, **keys)


def evaluate(*arguments: Any, **keys: Any) -> Ran:
    return command("eval", *arguments, **keys)


def selfdistill(*arguments: Any, **keys: Any) -> Ran:
    return command("selfdistill", *arguments, **keys)


def export(*arguments: Any, **keys: Any) -> Ran:
    return command("export", *arguments, **keys)


# Runs


def training_keys(target_model: Path, data: Path, out: Path, **keys: Any) -> dict[str, Any]:
    """Return the keys of a short run in float32 that fits no tree."""
    return {
        "base_model": target_model,
        "datasets": [{"path": str(data)}],
        "output_dir": out,
        "bf16": False,
        "val_set_size": 0,
        "calibration_tokens": 0,
        "logging_steps": 1,
        "sequence_len": 128,
        "micro_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "medusa_lr_multiplier": 1.0,
        **keys,
    }


#: Keys of a short evaluation.
TOKENS = 20
QUICK: dict[str, Any] = {
    "dtype": "float32",
    "max_new_tokens": TOKENS,
    "warmup": 0,
    "exactness": False,
}
#: The tree of most evaluations: paths of ranks.
NARROW = [(0,), (1,), (0, 0), (1, 0)]


def write_tree(path: Path, paths: Sequence[Sequence[int]]) -> Path:
    path.write_text(json.dumps({"medusa_choices": [list(p) for p in paths]}), encoding="utf-8")
    return path


def metrics(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl of one kind."""
    return [record for record in read_lines(run / "metrics.jsonl") if record["kind"] == kind]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a file of safetensors."""
    from safetensors.torch import load_file

    return load_file(path)


def numbers_in(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*\.?\d*", text)]


def greedy(
    model: PreTrainedModel, prompt: Sequence[int], tokens: int, ends: Iterable[int] = (EOS,)
) -> list[int]:
    """Return the greedy answer by whole passes of transformers: no cache, no draft.

    It includes the token that ends it.
    """
    text = list(prompt)
    stops = set(ends)
    with torch.no_grad():
        for _ in range(tokens):
            if len(text) > CONTEXT:
                break
            logits = model(torch.tensor([text]), use_cache=False).logits[0, -1]
            text.append(int(logits.argmax()))
            if text[-1] in stops:
                break
    return text[len(prompt) :]


def render(messages: Sequence[Mapping[str, str]]) -> str:
    """Return the prompt of the next answer by `TEMPLATE`, written out."""
    parts = ["<s>"]
    for message in messages:
        parts.append(f"<|{message['role']}|>{message['content']}")
        if message["role"] == "assistant":
            parts.append("</s>")
    return "".join([*parts, "<|assistant|>"])
