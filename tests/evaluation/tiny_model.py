"""A random two-layer Llama with a byte-level tokenizer and untrained heads, as a run directory."""

import json
from pathlib import Path

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_train.checkpoint.heads import save_draft
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.loading import load_target_model
from medusa_train.trees.tree import Tree
from tests.families import random_model

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT = 256


def write_tokenizer(directory: Path) -> None:
    specials = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {
        token: index
        for index, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=TEMPLATE,
    )
    wrapped.save_pretrained(directory)


def write_target_model(directory: Path) -> Path:
    shape = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "eos_token_id": 2,
    }
    model = random_model("llama", 3, 0.2, max_position_embeddings=CONTEXT, **shape)
    model.generation_config.repetition_penalty = 1.7  # must not reach the baseline
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_run(run: Path, target_model_dir: Path, num_heads: int = 3, draft: str = "medusa") -> Path:
    target_model = load_target_model(str(target_model_dir), dtype="float32")
    (run / "heads").mkdir(parents=True)
    save_draft(
        DRAFTS[draft].from_target_model(target_model, num_heads=num_heads),
        run / "heads",
        str(target_model_dir),
    )
    (run / "config.yaml").write_text(
        yaml.safe_dump({"base_model": str(target_model_dir)}), encoding="utf-8"
    )
    Tree.cartesian([2, 2]).save(run / "tree.json")
    return run


def write_bench(path: Path) -> Path:
    questions = [
        {"question_id": 1, "category": "sums", "turns": ["1+1?", "And 2+2?"]},
        {"question_id": 2, "category": "words", "turns": ["Say ay.", "Say oh."]},
        {"question_id": 3, "category": "words", "turns": ["x" * (CONTEXT + 1), "never asked"]},
    ]
    path.write_text(
        "".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8"
    )
    return path
