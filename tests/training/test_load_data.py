"""Tokenizer, chat template, and the data of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer, LlamaConfig

from medusa_train.errors import BackboneError, DataError
from medusa_train.training import load_data as prepare
from medusa_train.training.load_data import load_data, load_tokenizer
from tests.training.conftest import WORDS


@pytest.fixture
def bare(backbone_dir, tmp_path):
    """The backbone's directory with neither weights nor a chat template."""
    where = tmp_path / "bare"
    ignored = shutil.ignore_patterns("*.safetensors", "chat_template.jinja")
    shutil.copytree(backbone_dir, where, ignore=ignored)
    assert not AutoTokenizer.from_pretrained(where).chat_template
    return str(where)


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
