"""Tokenizer, chat template, and the data of a run."""

import json
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer, LlamaConfig, Phi3Config

from medusa_train.data import dataset
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import ConfigError, DataError, TargetModelError
from medusa_train.evaluation.target_model_quality import validation_conversations
from medusa_train.models.loading import load_tokenizer
from medusa_train.progress import LoadingProgress, RunProgress
from medusa_train.training.distributed import DistributedContext, PeerError
from medusa_train.training.load_data import load_data
from medusa_train.training.preflight import check_run
from medusa_train.training.stages import load_stages
from medusa_train.tree_search.traces import prompts_by_conversation
from tests.training.conftest import WORDS, train


@pytest.fixture
def bare(target_model_dir, tmp_path):
    """The target model's directory with neither weights nor a chat template."""
    where = tmp_path / "bare"
    shutil.copytree(
        target_model_dir,
        where,
        ignore=shutil.ignore_patterns("*.safetensors", "chat_template.jinja"),
    )
    assert not AutoTokenizer.from_pretrained(where).chat_template
    return str(where)


def test_held_out_conversations_are_not_trained_on_and_give_the_prompts(make_config, console):
    data = load_data(make_config(), console)
    train, held_out = (
        {example.source for example in part} for part in (data.train, data.validation)
    )
    assert (len(train), len(held_out)) == (32, 8)
    assert train.isdisjoint(held_out)
    assert {example.prompt for example in data.train}.isdisjoint(
        example.prompt for example in data.validation
    )
    assert data.prompts is data.validation
    everything = load_data(make_config(train_on_inputs=True), console)
    assert [example.source for example in everything.prompts] == [
        example.source for example in everything.validation
    ]
    assert everything.prompts.supervised_tokens < everything.validation.supervised_tokens


def test_the_prompts_are_those_trained_on_where_nothing_is_held_out(make_config, console):
    data = load_data(make_config(val_set_size=0, sequence_len=99_999), console)
    assert (len(data.validation), data.sequence_len < 99_999) == (0, True)
    assert data.prompts is data.train


def test_answers_that_fit_alone_do_not_move_the_split(make_config, console, tmp_path):
    """With `roles_to_train: [user]` chats are trained on whose first answer is too long to be a
    target.
    """
    path = tmp_path / "long.jsonl"
    chats = [
        [
            {"role": "user", "content": f"one {n}"},
            {"role": "assistant", "content": "two " * (3 if n % 2 else 90)},
        ]
        for n in range(80)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    keys = {
        "datasets": [{"path": str(path), "type": "messages"}],
        "sequence_len": 64,
        "val_set_size": 0.2,
    }
    data = load_data(make_config(**keys, roles_to_train=["user"]), console)
    assert 0 < len(data.prompts) < len(data.validation) == 16
    prompts = {example.key for example in data.prompts}
    assert prompts < {example.key for example in data.validation}
    cfg = make_config(**keys, roles_to_train=["user"])
    encoder = ChatEncoder(load_tokenizer(cfg.base_model, trust_remote_code=False))
    assert {example.key for example in validation_conversations(cfg, encoder)[0]} == prompts


@pytest.mark.parametrize(("share", "held_out"), [(0.0125, 1), (0.05, 4), (0.0, 0)])
def test_a_tree_is_not_fitted_to_one_or_two_chats(make_config, console, tmp_path, share, held_out):
    path = tmp_path / "chats.jsonl"
    chats = [
        [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"Well, {n}."}]
        for n in range(80)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    datasets = [{"path": str(path), "type": "messages"}]
    cfg = make_config(datasets=datasets, sequence_len=64, val_set_size=share)
    data = load_data(cfg, console)
    assert len(data.validation) == held_out
    assert data.prompts_held_out == (held_out >= 3)
    assert len(data.prompts) == (held_out if held_out >= 3 else 80 - held_out)


def test_several_answers_to_a_prompt_are_one_chat_to_a_tree(make_config, console, tmp_path):
    """Their prompts are answered once, and a tree is not fitted to answers to one or two."""
    path = tmp_path / "chats.jsonl"
    lines = []
    for prompt in range(20):
        for answer in range(4):
            chat = [
                {"role": "user", "content": f"Say {prompt}."},
                {"role": "assistant", "content": f"Well, {answer}."},
                {"role": "user", "content": "And?"},
                {"role": "assistant", "content": "No."},
            ]
            lines.append(json.dumps({"messages": chat}) + "\n")
    path.write_text("".join(lines))
    datasets = [{"path": str(path), "type": "messages"}]
    data = load_data(make_config(datasets=datasets, val_set_size=0.1), console)
    assert len(data.validation) == 8
    assert not data.prompts_held_out
    data = load_data(make_config(datasets=datasets, val_set_size=0.2), console)
    assert len(data.validation) == 16
    assert data.prompts_held_out
    conversations = prompts_by_conversation(data.prompts, 10_000, seed=1)
    assert len(conversations) == 4
    for prompts in conversations:
        assert len(prompts) == len(set(map(tuple, prompts))) == 5  # four histories of "And?"


@pytest.mark.parametrize(
    ("rows", "packed", "longest"), [(1, False, 700), (2, False, 600), (1, True, 600)]
)
def test_rows_of_longrope_models_end_where_the_angles_change(
    make_config, console, bare, rows, packed, longest
):
    """The longest row of a batch sets the angles of all."""
    path = Path(bare) / "config.json"
    factors = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    sizes = {
        "max_position_embeddings": 800,
        "original_max_position_embeddings": 600,
        "pad_token_id": 0,
    }
    vocab = json.loads(path.read_text())["vocab_size"]
    shape = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": vocab,
    }
    Phi3Config(
        **sizes, **shape, rope_parameters=factors, architectures=["Phi3ForCausalLM"]
    ).save_pretrained(bare)
    keys = {"sequence_len": 700, "micro_batch_size": rows, "sample_packing": packed}
    assert (
        load_data(
            make_config(base_model=bare, chat_template="vicuna_v1.1", **keys), console
        ).sequence_len
        == longest
    )
    assert ("micro_batch_size: 1" in console.file.getvalue()) is (longest == 600)


def test_training_on_looping_answers_is_warned_of_in_one_line(make_config, console, tmp_path):
    path = tmp_path / "loops.jsonl"
    said = {1: "one two three four five one two three " * 3}
    chats = [
        [{"from": "human", "value": "one"}, {"from": "gpt", "value": said.get(n, f"two {n}")}]
        for n in range(30)
    ]
    path.write_text("".join(json.dumps({"conversations": chat}) + "\n" for chat in chats))
    datasets = [{"path": str(path), "type": "sharegpt"}]
    load_data(make_config(datasets=datasets), console)
    assert "loop" not in console.file.getvalue()  # 3 %
    path.write_text("".join(json.dumps({"conversations": chat}) + "\n" for chat in chats[:10]))
    load_data(make_config(datasets=datasets), console)
    (line,) = [line for line in console.file.getvalue().splitlines() if "loop" in line]
    assert line.startswith("warning: 1 of 10 answers (10%) loop")


def test_data_that_were_generated_with_other_prompts_are_named(
    make_config, console, chats, tmp_path
):
    template = tmp_path / "thinking.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}{{"
        " '<|assistant|>' + ('' if enable_thinking | default(true) else 'one') if"
        " add_generation_prompt else '' }}"
    )
    path = tmp_path / "generated.jsonl"
    shutil.copy(chats, path)

    def notes(generated: object, kwargs: object) -> str:
        path.with_suffix(".settings.json").write_text(json.dumps(generated))
        datasets = [{"path": str(path), "type": "sharegpt"}]
        keys = {
            "datasets": datasets,
            "chat_template": str(template),
            "chat_template_kwargs": kwargs,
        }
        before = len(console.file.getvalue())
        load_data(make_config(**keys), console)
        return console.file.getvalue()[before:].replace("\n", " ")

    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    found = notes({"chat_template_kwargs": off}, None)
    assert (
        "generated.jsonl was generated with other prompts: its chat_template and"
        " chat_template_kwargs are" in found
    )
    assert "note: " in notes({}, off)
    assert "are vicuna_v1.1 and {}" in notes({"chat_template": "vicuna_v1.1"}, None)
    assert "are None and {}" in notes({"model": "m"}, None)  # the tokenizer's own
    assert "note: " not in notes({"model": "m", "weights": "of a run"}, None)
    for generated, kwargs in (
        ({}, None),
        ({}, on),
        ({"chat_template_kwargs": off}, off),
        ([], off),
        ({"chat_template": "gone.jinja"}, None),
    ):
        assert "note: " not in notes(generated, kwargs)


def test_a_tokenizer_without_a_template_will_do_where_the_data_name_theirs(
    make_config, console, bare, chats
):
    untold = {"path": str(chats), "type": "auto"}
    with pytest.raises(DataError, match="no chat template"):
        load_data(make_config(base_model=bare, datasets=[untold]), console)
    one, other = ({"path": str(chats), "conversation": name} for name in ("vicuna_v1.1", "llama-2"))
    for datasets in ([one], [one, other]):
        cfg = make_config(base_model=bare, datasets=datasets)
        assert cfg.chat_template == (None if len(datasets) > 1 else "vicuna_v1.1")
        data = load_data(cfg, console)
        first = data.train[0]
        assert data.chat_template == "vicuna_v1.1"  # stored for decoding
        text = AutoTokenizer.from_pretrained(bare).decode(first.tokens)
        assert "ASSISTANT:" in text or "[/INST]" in text
    with pytest.raises(DataError, match="no chat template"):
        load_data(make_config(base_model=bare, datasets=[one, untold]), console)


def test_sharegpt_without_any_template_is_read_as_axolotl_reads_it(make_config, console, bare):
    data = load_data(make_config(base_model=bare), console)
    assert "ASSISTANT:" in AutoTokenizer.from_pretrained(bare).decode(data.train[0].tokens)


def test_a_target_model_that_names_no_context_is_refused(make_config, console, bare):
    path = Path(bare) / "config.json"
    path.write_text(
        json.dumps({"model_type": "mpt", "architectures": ["MptForCausalLM"], "d_model": 32})
    )
    with pytest.raises(TargetModelError, match="max_position_embeddings"):
        load_data(make_config(base_model=bare), console)


def test_tokens_without_an_embedding_are_named(make_config, console, target_model_dir, tmp_path):
    where = Path(shutil.copytree(target_model_dir, tmp_path / "added"))
    tokenizer = AutoTokenizer.from_pretrained(where)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save_pretrained(where)
    with pytest.raises(
        DataError, match=r"token 301 \(<\|im_end\|>\) has no embedding, since the model has 300"
    ):
        load_data(make_config(base_model=str(where), chat_template="chatml"), console)


def test_records_with_such_tokens_are_dropped_where_bad_ones_are_skipped(
    make_config, console, target_model_dir, tmp_path
):
    where = Path(shutil.copytree(target_model_dir, tmp_path / "added"))
    tokenizer = AutoTokenizer.from_pretrained(where)
    tokenizer.add_tokens(["zzz"])
    tokenizer.save_pretrained(where)
    texts = ["w1 w2", "w3 zzz", "w4", "w5 w6", "w7 zzz zzz"]
    chats = [
        {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": text}]}
        for text in texts
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    keys = {"base_model": str(where), "datasets": [{"path": str(path)}], "val_set_size": 0.3}
    with pytest.raises(DataError, match=r"\(zzz\) has no embedding.*and 1 more conversations"):
        load_data(make_config(**keys), console)
    data = load_data(make_config(**keys, skip_bad_records=True), console)
    assert len(data.train) + len(data.validation) == 3
    shown = console.file.getvalue()
    assert "2 conversations skipped: a token has no embedding; the first:" in shown
    assert f"{path}:2: token 300 (zzz)" in shown or f"{path}:5: token 300 (zzz)" in shown


def test_more_unfrozen_layers_than_the_target_model_has_are_refused(make_config):
    with pytest.raises(ConfigError, match="medusa_num_unfreeze_layers: 3 exceeds the 2 layers"):
        check_run(make_config(recipe="medusa2", medusa_num_unfreeze_layers=3), 1)


def test_a_sentencepiece_model_alone_makes_a_fast_tokenizer(make_config, tmp_path):
    """As Vicuna and the first Llamas ship theirs: tokenizer.model without a tokenizer.json."""
    lines = (" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS)))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=str(tmp_path / "tokenizer"), vocab_size=320, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    LlamaConfig(vocab_size=320).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer"})
    )
    tokenizer = load_tokenizer(str(tmp_path), trust_remote_code=False)
    assert tokenizer.is_fast
    tokens = tokenizer("three large", add_special_tokens=False)["input_ids"]
    assert tokens == sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model")).encode(
        "three large"
    )
    assert torch.tensor(tokens).max() < len(tokenizer)


class ThreadWorld(DistributedContext):
    """Two processes as threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: dict[int, bytes]) -> None:
        super().__init__(rank, 2)
        self.barrier, self.values = barrier, values

    def gather(self, value):
        self.values[self.rank] = pickle.dumps(value)
        self.barrier.wait(60)
        values = [pickle.loads(self.values[rank]) for rank in range(2)]
        self.barrier.wait(60)
        return values

    def broadcast(self, value):
        return self.gather(value)[0]


def load_in_world(cfg, console, world):
    with LoadingProgress(RunProgress(console)) as shown:
        (data,) = load_stages([cfg], console, world, shown)
    return data


def load_in_two_processes(cfg, console):
    barrier, values = threading.Barrier(2), {}
    with ThreadPoolExecutor(2) as pool:
        worlds = [ThreadWorld(rank, barrier, values) for rank in range(2)]
        return list(pool.map(lambda world: load_in_world(cfg, console, world), worlds))


def test_one_process_tokenizes_and_all_have_the_same_data(make_config, console, monkeypatch):
    encoded = []
    encode = dataset.encode_datasets

    def record(*args, **options):
        encoded.append(options)
        return encode(*args, **options)

    monkeypatch.setattr(dataset, "encode_datasets", record)
    cfg = make_config(sample_packing=True)
    loaded = load_in_two_processes(cfg, console)
    assert len(encoded) == 1
    alone = load_data(cfg, console)
    for data in loaded:
        assert data.train.fingerprint() == alone.train.fingerprint()
        assert data.validation.fingerprint() == alone.validation.fingerprint()
        assert data.train.row_len == alone.train.row_len
        assert data.train.report == alone.train.report
        assert data.prompts is data.validation


def test_rows_are_sent_once(make_config, console):
    """Each is a slice of one tensor, which pickle would store with every slice."""
    train = pickle.loads(pickle.dumps(load_data(make_config(), console).train))
    assert len(train) > 20
    assert len(pickle.dumps(train)) < 1.1 * len(train.to_bytes())


def test_data_that_one_process_cannot_read_end_all(make_config, console, tmp_path):
    cfg = make_config(datasets=[{"path": str(tmp_path / "absent.jsonl")}])
    barrier, values = threading.Barrier(2), {}
    with ThreadPoolExecutor(2) as pool:
        worlds = [ThreadWorld(rank, barrier, values) for rank in range(2)]
        done = [pool.submit(load_in_world, cfg, console, world) for world in worlds]
    main, other = (one.exception() for one in done)
    assert "absent.jsonl" in str(main)
    assert isinstance(other, PeerError)


def test_a_directory_may_be_the_working_one(make_config, console, chats, tmp_path, monkeypatch):
    shutil.copy(chats, tmp_path / "chats.jsonl")
    monkeypatch.chdir(tmp_path)
    assert len(load_data(make_config(datasets=[{"path": "."}]), console).train)


def test_deepspeed_is_checked_before_data_are_read(make_config, console, monkeypatch):
    monkeypatch.setattr("medusa_train.training.stages.load_data", None)
    zero2 = {"zero_optimization": {"stage": 2}}
    for deepspeed, words in (
        (zero2, "partition 8-bit states"),
        ({"train_batch_size": 7}, "train_batch_size: 7, but"),
    ):
        with pytest.raises(ConfigError, match=words):
            train(make_config(optimizer="adamw_bnb_8bit", deepspeed=deepspeed), console)
