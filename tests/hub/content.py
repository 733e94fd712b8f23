"""What the stand-in hub holds: tiny random models under the names of configs/, chats and questions
of ours.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.data.builtin_templates import TEMPLATES as BUILTIN
from medusa_train.data.sources import PUBLIC_DATASETS
from medusa_train.evaluation.questions import NAMED_BENCHMARKS
from tests.chat_templates import LLAMA_3_1, QWEN3, SMOLLM2, TOOLS_CHATML
from tests.model_types import tiny_model
from tests.tool_chats import CHAT

#: Class or type of the config, chat template (Vicuna has none), end token and size of the vocabulary
#: of each model.
MODELS: dict[str, tuple[type | str, str | None, str, int]] = {
    "lmsys/vicuna-7b-v1.5": (LlamaConfig, None, "</s>", 2048),
    "lmsys/vicuna-13b-v1.5": (LlamaConfig, None, "</s>", 2048),
    "lmsys/vicuna-33b-v1.3": (LlamaConfig, None, "</s>", 2048),
    "HuggingFaceH4/zephyr-7b-beta": (MistralConfig, BUILTIN["zephyr"], "</s>", 2048),
    "meta-llama/Llama-3.1-8B-Instruct": (
        LlamaConfig,
        LLAMA_3_1,
        "<|eot_id|>",
        32064,
    ),  # EAGLE-3 predicts 32,000
    "Qwen/Qwen3-8B": (Qwen3Config, QWEN3, "<|im_end|>", 32064),
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", QWEN3, "<|im_end|>", 32064),
    "Qwen/Qwen3.5-27B": ("qwen3_5", QWEN3, "<|im_end|>", 32064),
    "openai/gpt-oss-20b": ("gpt_oss", SMOLLM2, "<|im_end|>", 32064),
    "google/gemma-4-12B-it": ("gemma4_unified", SMOLLM2, "<|im_end|>", 32064),
    "Qwen/Qwen3-0.6B": (Qwen3Config, QWEN3, "<|im_end|>", 16448),  # its heads predict 16,384 tokens
    # their heads predict 8,192
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": (Qwen2Config, TOOLS_CHATML, "<|im_end|>", 8256),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": (Qwen2Config, SMOLLM2, "<|im_end|>", 8256),
    "models/smollm2-135m-instruct": (
        LlamaConfig,
        SMOLLM2,
        "<|im_end|>",
        8256,
    ),  # its heads predict 8,192
    "data/tiny": (LlamaConfig, BUILTIN["zephyr"], "</s>", 2048),
}
_SPECIAL = ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<|im_end|>"]
# the first is written by `make smollm2-model`
_LOCAL = ("models/smollm2-135m-instruct", "data/tiny")
_CHATS = 24


def write_hub(root: Path) -> None:
    """Write the repositories that configs/ and the named data sets refer to."""
    for name in MODELS:
        if name not in _LOCAL:
            write_model(root / "models" / name, name)
    sharegpt, mtbench = PUBLIC_DATASETS["sharegpt"], NAMED_BENCHMARKS["mtbench"]
    chats = [
        {"id": f"c{n}", "conversations": [_as_sharegpt(message) for message in messages]}
        for n, messages in enumerate(_chats())
    ]
    chats[1]["conversations"] = chats[1]["conversations"][1:]  # a chat that begins with an answer
    chats[2]["conversations"] = []
    _write(root / "datasets" / str(sharegpt.hub_repo) / str(sharegpt.hub_file), json.dumps(chats))
    questions = [
        {
            "question_id": 81 + n,
            "category": category,
            "turns": [f"Name {n + 3} things of {category}.", "Why these?"],
        }
        for n, category in enumerate(["writing", "roleplay", "math", "coding"])
    ]
    path = root / "datasets" / str(mtbench.hub_repo) / str(mtbench.hub_file)
    _write(path, "".join(json.dumps(question) + "\n" for question in questions))


def write_local_data(place: Path) -> None:
    """Write what configurations find locally into the working directory: small models, and answers
    to prompts.
    """
    for name in _LOCAL:
        write_model(place / name, name)
    lines = [
        json.dumps({"id": f"c{n}", "messages": chat}) + "\n" for n, chat in enumerate(_chats()[:10])
    ]
    for name in (
        "llama31_8b",
        "qwen3_8b",
        "qwen3_06b",
        "qwen3_30b_a3b",
        "qwen35_27b",
        "gemma4_12b",
        "qwen_coder_15b",
        "vicuna33b_m2",
        "zephyr7b_m2",
        "tiny",
        "tiny_more",
    ):
        _write(place / "data" / "selfdistill" / f"{name}.jsonl", "".join(lines[:8]))
    tool_chats = [json.dumps({**CHAT, "id": f"t{n}"}) + "\n" for n in range(8)]
    _write(place / "data" / "selfdistill" / "qwen_coder_tools.jsonl", "".join(tool_chats))
    _write(place / "data.jsonl", "".join(lines[:8]))  # the configurations for any model
    for model in ("smollm2", "qwen_coder"):
        for name, part in {model: lines[:8], f"{model}_validation": lines[8:]}.items():
            (place / "data" / "selfdistill" / f"{name}.jsonl.gz").write_bytes(
                gzip.compress("".join(part).encode())
            )


def write_model(folder: Path, name: str) -> None:
    """Write a random model that ends its answers, with the tokenizer of the embedded one."""
    kind, template, end, vocab_size = MODELS[name]
    tokenizer = AutoTokenizer.from_pretrained(PROJECT_ROOT / "data" / "tiny")
    if end != tokenizer.eos_token:
        tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL, "eos_token": end})
    tokenizer.chat_template = template
    if isinstance(kind, str):
        model = _tiny_model_that_ends(kind, vocab_size, tokenizer)
    else:
        model = _model_that_ends(kind, vocab_size, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tiny_model_that_ends(model_type: str, vocab_size: int, tokenizer: Any) -> PreTrainedModel:
    """Build a random model of a type in bfloat16, of whose answers every tenth token is the last."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 8192}
    model = tiny_model(model_type, vocab_size, **ids).to(torch.bfloat16)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[len(tokenizer) :] = 0.0
        head[tokenizer.eos_token_id] *= 3.0
    return model


def _model_that_ends(kind: type, vocab_size: int, tokenizer: Any) -> PreTrainedModel:
    """Build a random model of four layers in bfloat16 that ends its answers."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "head_dim": 16,
    }
    config = kind(
        **shape,
        vocab_size=vocab_size,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        # the first value of every state stays 4, so lm_head can have a bias: for the end token,
        # against unused ones
        model.model.embed_tokens.weight[:, 0] = 4.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        head = model.lm_head.weight
        head[:, 0] = 0.0
        head[tokenizer.eos_token_id] = 0.0
        head[tokenizer.eos_token_id, 0] = 12.0
        head[len(tokenizer) :, 0] = -40.0
    return model


def _chats() -> list[list[dict[str, str]]]:
    with (PROJECT_ROOT / "data" / "selfdistill" / "tiny.jsonl").open(encoding="utf-8") as file:
        chats = [json.loads(line)["messages"] for line in file]
    return sorted(chats, key=lambda chat: sum(len(message["content"]) for message in chat))[:_CHATS]


def _as_sharegpt(message: dict[str, str]) -> dict[str, str]:
    return {"from": "human" if message["role"] == "user" else "gpt", "value": message["content"]}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
