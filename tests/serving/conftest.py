"""Heads trained briefly on the embedded test model, exported in every way that vLLM loads, and
decoded by a real vLLM.
"""

import io
import json
import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from medusa_train.checkpoint.heads import read_heads, write_heads
from medusa_train.checkpoint.load_model import load_for_decoding
from medusa_train.checkpoint.resolve import EAGLE3, resolve_model
from medusa_train.config.load import load_config
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import TrainConfig
from medusa_train.config.types import ExportTarget
from medusa_train.export.write import export_run
from medusa_train.inference.generate import Decoder
from medusa_train.training.stages import train_stages
from medusa_train.trees.tree import Tree

TINY = PROJECT_ROOT / "data" / "tiny"
HEADS = 4
MAX_TOKENS = 64
PROMPTS = 12
STATES = "eagle_aux_hidden_state_layer_ids"
KEPT = 512  # tokens of the reduced vocabulary, of 2,048


@dataclass
class Export:
    """Heads in vLLM's layout with the target model to serve them on.

    Attributes:
        directory: the heads. model: the target model. k: number of draft tokens.
        method: vLLM's name of the draft; None: the directory is served as a model that names its
            target model.
    """

    directory: Path
    model: Path
    k: int = HEADS
    method: str | None = "medusa"


@dataclass
class Chain:
    """What decoding with a chain gave: answers, steps that verified a draft, and accepted draft
    tokens by position.
    """

    answers: list[list[int]]
    drafts: int
    accepted: list[int]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of an environment with vLLM; without one everything here is skipped."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip(
            "VLLM_PYTHON names no interpreter of an environment with vLLM (.ci/vllm makes one)"
        )
    return python


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    lines = (
        (PROJECT_ROOT / "data/bench/tiny/question.jsonl").read_text(encoding="utf-8").splitlines()
    )
    return [tokenize(json.loads(line)["turns"][0], TINY) for line in lines[:PROMPTS]]


def tokenize(question: str, model: Path) -> list[int]:
    """Token ids of a question as the model's chat template writes it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


@pytest.fixture(scope="session")
def exports(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Export]:
    """The exports by name: Medusa heads with matrices of each kind, for a merged target model too, and
    drafts of DFlash and EAGLE-3.
    """
    root = tmp_path_factory.mktemp("serving")
    runs = {
        "full": train(root / "full", "tiny_m1"),
        "shared": train(root / "shared", "tiny_m1", SHARED),
    }
    runs["reduced"] = reduce_vocabulary(runs["full"], root / "reduced")
    runs["shared_reduced"] = reduce_vocabulary(runs["shared"], root / "shared_reduced")
    exported = {name: Export(export(run), TINY) for name, run in runs.items()}
    exported["reduced"].k = HEADS - 1  # vLLM then builds the first heads only
    joint = train(root / "joint", "tiny_m2", f"lora_model_dir={runs['full']}")
    merged = export_run(resolve_model(str(joint), None, None), "merged").target
    exported["merged"] = Export(export(joint), merged)
    run = train(root / "dflash", "tiny_dflash", f"dflash.max_draft_tokens={HEADS}", "max_steps=120")
    exported["dflash"] = Export(export(run), TINY, method="dflash")
    for name, keys in {"eagle3": (), "eagle3_reduced": (f"eagle3.vocab_size={KEPT}",)}.items():
        run = train(root / name, "tiny_eagle3", *keys)
        exported[name] = Export(export(run), TINY, method="eagle3")
    speculators = export(run, "speculators")
    exported["speculators"] = Export(speculators, TINY, k=3, method=None)
    for name in PUBLISHED:
        directory = as_published(name, speculators, root / name)
        exported[name] = Export(directory, TINY, k=3, method="eagle3")
    return exported


#: Layouts of published EAGLE-3 drafts: Red Hat's of 2025 with a copy of the embeddings and Python
#: code, speculators' of 2026 with the layer of Qwen3, the authors' pickle, and one without lm_head.
PUBLISHED = ("published_redhat", "published_qwen3", "published_pickle", "published_without_lm_head")


def as_published(name: str, source: Path, target: Path) -> Path:
    """Write the draft in `source`, of the layout speculators, as others publish theirs."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    layer = config["transformer_layer_config"]
    if name == "published_redhat":
        embeddings = load_file(TINY / "model.safetensors")["model.embed_tokens.weight"]
        tensors["embed_tokens.weight"] = embeddings.float()
        config |= {
            "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
            "has_no_defaults_at_init": False,
            "norm_before_residual": True,
            "target_hidden_size": None,
        }
        (target / "eagle3.py").write_text("raise SystemExit")
    elif name == "published_qwen3":
        generator = torch.Generator().manual_seed(0)
        for letter, size in (("q", 4.0), ("k", 1.0)):
            noise = 0.1 * torch.randn(layer["head_dim"], generator=generator)
            tensors[f"layers.0.self_attn.{letter}_norm.weight"] = size + noise
        layer |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    else:
        tensors = {key.replace("layers.0.", "midlayer."): t for key, t in tensors.items()}
        at_the_top = {key: config[key] for key in ("draft_vocab_size", STATES)}
        config = {**layer, **at_the_top, "architectures": ["LlamaForCausalLM"]}
    if name == "published_without_lm_head":
        for key in ("lm_head.weight", "d2t", "t2d"):
            del tensors[key]
        config |= {"architectures": [EAGLE3], "draft_vocab_size": None}
    (target / "config.json").write_text(json.dumps(config))
    if name == "published_pickle":
        torch.save(tensors, target / "pytorch_model.bin")
    else:
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


SHARED = "medusa_share_lm_head=true"


def train(run: Path, recipe: str, *keys: str) -> Path:
    """Train heads for some steps, which is enough for every head to guess right now and then."""
    brief = [
        "max_steps=25",
        "warmup_steps=3",
        "val_set_size=0.02",
        "calibration_tokens=0",
        "bf16=false",
    ]
    data = [
        f"datasets=[{{path: {text_file(run.parent)}, type: messages}}]",
        f"dataset_prepared_path={run.parent}/data",
    ]
    own = [f"base_model={TINY}", f"output_dir={run}", *keys]
    if recipe in ("tiny_m1", "tiny_m2"):
        own.append(f"medusa_num_heads={HEADS}")
    cfg = load_config(
        TrainConfig, PROJECT_ROOT / "configs" / f"{recipe}.yaml", [*brief, *data, *own]
    )
    console = Console(file=io.StringIO(), width=200)
    assert train_stages(cfg, console, console) == 0
    return run


def text_file(folder: Path) -> Path:
    """Write the conversations that the heads are trained on: the first 204 of the demo."""
    path = folder / "chats.jsonl"
    lines = (
        (PROJECT_ROOT / "data/selfdistill/tiny.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()[:204]
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def reduce_vocabulary(run: Path, target: Path) -> Path:
    """Copy a run with its heads restricted to the most frequent tokens of the training text."""
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("checkpoints", "export"))
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    lines = text_file(target.parent).read_text(encoding="utf-8").splitlines()
    counts = Counter(token for line in lines for token in tokenizer(line).input_ids)
    kept = torch.tensor([token for token, _ in counts.most_common(KEPT)])
    heads = read_heads(run / "heads")
    state = {
        name: tensor[kept] if name.startswith("lm_heads") else tensor
        for name, tensor in heads.state.items()
    }
    write_heads(
        replace(heads, state={**state, "token_map": kept}, target_model_tokens=2048),
        target / "heads",
    )
    return target


def export(run: Path, to: ExportTarget = "vllm") -> Path:
    return export_run(resolve_model(str(run), None, None), to).target


@pytest.fixture(scope="session")
def wrong(
    exports: dict[str, Export], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Export]:
    """Exports with something wrong in them."""
    root = tmp_path_factory.mktemp("wrong")
    tensors = load_file(exports["full"].directory / "model.safetensors")
    config = json.loads((exports["full"].directory / "config.json").read_text())
    without = {name: tensor for name, tensor in tensors.items() if name != "lm_heads.1.weight"}
    short = {**tensors, "lm_heads.1.weight": tensors["lm_heads.1.weight"][:-1].clone()}
    rows = {
        name: tensor[:KEPT].clone() if "lm_heads" in name else tensor
        for name, tensor in tensors.items()
    }
    written = {
        "matrix_missing": (without, config),
        "block_missing": (
            {name: t for name, t in tensors.items() if name != "blocks.1.layers.0.weight"},
            config,
        ),
        "biases_dropped": (tensors, {**config, "medusa_fc_bias": False}),
        "shape": (short, config),
        "vocabulary": (
            {**rows, "token_map": torch.arange(KEPT)},
            {**config, "truncated_vocab_size": KEPT},
        ),
        "eagle-path": (tensors, config),
    }
    for name, (changed, keys) in written.items():
        (root / name).mkdir()
        save_file(changed, root / name / "model.safetensors", metadata={"format": "pt"})
        (root / name / "config.json").write_text(json.dumps(keys))
    return {name: Export(root / name, TINY) for name in written}


@pytest.fixture(scope="session")
def served(
    vllm_python: str,
    exports: dict[str, Export],
    wrong: dict[str, Export],
    prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """The results of offline.py for every export, plain decoding of both target models, and every wrong
    export.
    """
    engines: dict[str, Any] = {
        "plain": {"model": str(TINY), "heads": None},
        "plain_merged": {"model": str(exports["merged"].model), "heads": None},
        "too_many": {**engine(exports["full"]), "k": HEADS + 1, "limit": 1},
    }
    engines |= {name: engine(one) for name, one in exports.items()}
    engines |= {name: {**engine(one), "limit": 1} for name, one in wrong.items()}
    return decode_with_vllm(vllm_python, engines, prompts, tmp_path_factory.mktemp("offline"))


def engine(one: Export) -> dict[str, Any]:
    """What offline.py reads of an export."""
    if one.method is None:
        return {"model": str(one.directory), "heads": None}
    return {"model": str(one.model), "heads": str(one.directory), "k": one.k, "method": one.method}


def decode_with_vllm(
    python: str, engines: dict[str, Any], prompts: list[list[int]], folder: Path
) -> dict[str, Any]:
    """Run offline.py on these engines; one process for all, since importing vLLM takes most of the
    time.
    """
    jobs = {"prompts": prompts, "max_tokens": MAX_TOKENS, "engines": engines}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [python, str(Path(__file__).with_name("offline.py")), "jobs.json", "results.json"]
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            command, cwd=folder, env=environment(), stdout=log, stderr=log, check=False
        )
    assert done.returncode == 0, (folder / "log").read_text()[-4000:]
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def environment() -> dict[str, str]:
    """The environment of vLLM's processes: one thread, a small KV cache, the engine in the process
    that asks for it.
    """
    ours = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    return {
        **ours,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def decode_here(one: Export, prompts: list[list[int]]) -> Chain:
    """Decode with our loop and the chain of the first k heads, from the exported directories."""
    loaded = load_for_decoding(resolve_model(str(one.directory), str(one.model), None), "float32")
    decoder = Decoder(loaded.target_model, loaded.draft, Tree.chain(one.k))
    done = [decoder.generate(prompt, MAX_TOKENS) for prompt in prompts]
    lengths = [length for generation in done for length in generation.accepted]
    accepted = [sum(length > position for length in lengths) for position in range(one.k)]
    return Chain([generation.tokens for generation in done], len(lengths), accepted)
