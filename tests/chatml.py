"""A base model's files with a ChatML tokenizer: its generation config ends texts at <|endoftext|>,
the chat template ends turns at <|im_end|>. The model answers `ANSWER<|im_end|>` to every chat, and
goes on with `REST` for ever if nothing stops it.
"""

import json
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_train.checkpoint.heads import save_draft
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.loading import load_target_model
from medusa_train.trees.tree import Tree
from tests.families import random_model

END_OF_TEXT, IM_START, IM_END = range(3)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ANSWER = "abcde"
REST = "xyz"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chatml_tokenizer(
    template: str = TEMPLATE, eos_token: str = "<|endoftext|>", special: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    names = [*SPECIAL, *special]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*names, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos_token, chat_template=template
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    return fast


def write_target_model(directory: Path, **tokenizer: str) -> Path:
    """Write a model whose next token depends on the last token alone."""
    fast = chatml_tokenizer(**tokenizer)
    model = random_model(
        "llama",
        3,
        0.2,
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        max_position_embeddings=256,
        eos_token_id=END_OF_TEXT,
    )
    letters = [fast.convert_tokens_to_ids(letter) for letter in ("Ċ", *ANSWER)]
    rest = [fast.convert_tokens_to_ids(letter) for letter in (*REST, REST[0])]
    followers = dict(pairwise([*letters, IM_END, *rest]))
    with torch.no_grad():
        for layer in model.model.layers:  # nothing but the embedding reaches lm_head
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        torch.manual_seed(0)
        vectors = torch.nn.functional.normalize(torch.randn(300, 64), dim=1)
        model.model.embed_tokens.weight.copy_(vectors)
        model.lm_head.weight.zero_()
        for token, follower in followers.items():
            model.lm_head.weight[follower] += 5 * vectors[token]
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
    settings = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    assert settings["eos_token_id"] == END_OF_TEXT
    return directory


def write_run(run: Path, target_model: Path, config: str = "") -> Path:
    """Write a run of untrained Medusa heads on the model."""
    loaded = load_target_model(str(target_model), dtype="float32")
    save_draft(MedusaDraft.from_target_model(loaded, 2), run / "heads", str(target_model))
    (run / "config.yaml").write_text(f"base_model: {target_model}\n{config}", encoding="utf-8")
    Tree.cartesian([2, 2]).save(run / "tree.json")
    return run
