"""Which attention a run trains with, and that it says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer, LlamaConfig

from medusa_train.errors import BackboneError, DataError
from medusa_train.progress import RunProgress
from medusa_train.training import backbone_recipe as attention
from medusa_train.training import load_data as prepare
from medusa_train.training.backbone_recipe import choose_attention
from medusa_train.training.load_data import load_data, load_tokenizer
from medusa_train.training.setup import build_trainer
from tests.families import random_backbone
from tests.training.conftest import WORDS
from tests.varlen import APART, LEAKING


def test_on_a_cpu_a_mask_is_used_whatever_is_asked_for() -> None:
    for wanted, reason in (("auto", "needs a GPU"), (True, "needs a GPU"), (False, "false")):
        backbone = random_backbone("llama")
        line = choose_attention(backbone, wanted, packed=True)
        assert line.startswith("attention: torch sdpa with a block-diagonal mask")
        assert reason in line
        assert not backbone.varlen


def test_rows_of_one_conversation_need_neither() -> None:
    assert "causal" in choose_attention(random_backbone("llama"), True, packed=False)


def test_where_nothing_stands_in_the_way_the_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash_obstacle", lambda *args, **facts: None)
    monkeypatch.setattr(attention, "FLASH", APART)
    backbone = random_backbone("llama")
    assert "varlen kernel" in choose_attention(backbone, "auto", packed=True)
    assert backbone.varlen
    assert "flash_attention: false" in choose_attention(random_backbone("llama"), False, packed=True)


@pytest.mark.parametrize("kernel", [LEAKING, "flash_attention_2"])
def test_a_kernel_that_leaks_or_cannot_be_loaded_leaves_the_mask(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash_obstacle", lambda *args, **facts: None)
    monkeypatch.setattr(attention, "FLASH", kernel)
    backbone = random_backbone("llama")
    line = choose_attention(backbone, "auto", packed=True)
    assert line.startswith("attention: torch sdpa with a block-diagonal mask for packed rows (")
    assert not backbone.varlen
    assert backbone.config._attn_implementation == "sdpa"


@pytest.fixture
def bare(backbone_dir, tmp_path):
    """The backbone's directory with neither weights nor a chat template."""
    where = tmp_path / "bare"
    ignored = shutil.ignore_patterns("*.safetensors", "chat_template.jinja")
    shutil.copytree(backbone_dir, where, ignore=ignored)
    assert not AutoTokenizer.from_pretrained(where).chat_template
    return str(where)


def test_every_key_of_the_optimisation_arrives(make_config, console):
    cfg = make_config(
        recipe="medusa2",
        medusa_num_unfreeze_layers=1,
        learning_rate=1e-3,
        medusa_lr_multiplier=3.0,
        weight_decay=0.1,
        medusa_decay_coefficient=0.5,
        medusa_heads_coefficient=0.3,
        medusa_scheduler="sine",
        max_grad_norm=0.3,
        lr_scheduler="constant",
        seed=7,
    )
    trainer = build_trainer(cfg, load_data(cfg, console), RunProgress(console))
    groups = [
        (g["lr"], g["weight_decay"], {p.ndim for p in g["params"]}) for g in trainer.strategy.optimizer.param_groups
    ]
    assert groups == [
        (pytest.approx(3e-3), 0.1, {2}),
        (pytest.approx(3e-3), 0.0, {1}),
        (pytest.approx(1e-3), 0.1, {2}),
        (pytest.approx(1e-3), 0.0, {1}),
    ]
    objective = trainer.objective
    assert (objective.decay, objective.heads_coefficient, objective.schedule) == (0.5, 0.3, "sine")
    assert trainer.strategy.max_grad_norm == 0.3
    assert (trainer.loader.seed, trainer.loader.shuffle) == (7, True)
    assert (trainer.loader.micro_batch_size, trainer.accumulation) == (4, 2)


def test_held_out_conversations_are_not_trained_on_and_give_the_prompts(make_config, console):
    data = load_data(make_config(), console)
    train, held_out = ({example.source for example in part} for part in (data.train, data.validation))
    assert (len(train), len(held_out)) == (32, 8)
    assert train.isdisjoint(held_out)
    assert {example.key for example in data.train}.isdisjoint(example.key for example in data.validation)
    assert data.prompts is data.validation
    everything = load_data(make_config(train_on_inputs=True), console)
    assert [example.source for example in everything.prompts] == [example.source for example in everything.validation]
    assert everything.prompts.supervised_tokens < everything.validation.supervised_tokens


def test_the_prompts_are_those_trained_on_where_nothing_is_held_out(make_config, console):
    data = load_data(make_config(val_set_size=0), console)
    assert len(data.validation) == 0
    assert data.prompts is data.train


def test_a_tokenizer_without_a_template_will_do_where_the_data_name_theirs(make_config, console, bare, chats):
    untold = {"path": str(chats), "type": "auto"}
    with pytest.raises(DataError, match="no chat template"):
        load_data(make_config(base_model=bare, datasets=[untold]), console)
    one, other = ({"path": str(chats), "conversation": name} for name in ("vicuna_v1.1", "llama-2"))
    for datasets in ([one], [one, other]):
        cfg = make_config(base_model=bare, datasets=datasets)
        assert cfg.chat_template == (None if len(datasets) > 1 else "vicuna_v1.1")
        first = load_data(cfg, console).train[0]
        text = AutoTokenizer.from_pretrained(bare).decode(first.tokens)
        assert "ASSISTANT:" in text or "[/INST]" in text
    with pytest.raises(DataError, match="no chat template"):
        load_data(make_config(base_model=bare, datasets=[one, untold]), console)


def test_sharegpt_without_any_template_is_read_as_axolotl_reads_it(make_config, console, bare):
    data = load_data(make_config(base_model=bare), console)
    assert "ASSISTANT:" in AutoTokenizer.from_pretrained(bare).decode(data.train[0].tokens)


def test_a_backbone_that_names_no_context_is_refused(make_config, console, bare):
    path = Path(bare) / "config.json"
    path.write_text(json.dumps({"model_type": "mpt", "architectures": ["MptForCausalLM"], "d_model": 32}))
    with pytest.raises(BackboneError, match="max_position_embeddings"):
        load_data(make_config(base_model=bare), console)


@pytest.mark.parametrize("offline", [True, False])
def test_the_tokenizer_asks_no_hub_that_is_out_of_reach(make_config, monkeypatch, offline):
    asked = {}
    monkeypatch.setattr(prepare, "hub_is_unreachable", lambda: offline)
    monkeypatch.setattr(prepare.AutoTokenizer, "from_pretrained", lambda where, **keys: asked.update(keys))
    load_tokenizer(make_config(), "owner/name")
    assert asked["local_files_only"] is offline


def test_a_sentencepiece_model_alone_makes_a_fast_tokenizer(make_config, tmp_path):
    """As Vicuna and the first Llamas ship theirs: tokenizer.model without a tokenizer.json."""
    lines = (" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS)))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=str(tmp_path / "tokenizer"), vocab_size=320, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    LlamaConfig(vocab_size=320).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    tokenizer = load_tokenizer(make_config(base_model=str(tmp_path)), str(tmp_path))
    assert tokenizer.is_fast
    tokens = tokenizer("three large", add_special_tokens=False)["input_ids"]
    reference = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    assert tokens == reference.encode("three large")
    assert torch.tensor(tokens).max() < len(tokenizer)
