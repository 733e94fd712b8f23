from __future__ import annotations

from pathlib import Path

import pytest
import torch

from medusa_train.data.conversation import Message
from medusa_train.errors import DataError
from medusa_train.inference.generate import Decoder
from medusa_train.models.backbone import Backbone
from medusa_train.selfdistill import local
from medusa_train.selfdistill.engines import Request
from medusa_train.selfdistill.local import LocalEngine, fastest_dtype
from medusa_train.selfdistill.sampling import Sampler
from tests.evaluation.tiny_model import CONTEXT, write_backbone

PROMPT = (Message("user", "Say something."),)


def asks(text: str) -> Request:
    return Request((Message("user", text),), seed=0)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    directory: Path = write_backbone(tmp_path_factory.mktemp("backbone"))
    return Backbone.load(str(directory), dtype=torch.float64)


def engine(backbone: Backbone, temperature: float = 0.0, max_new_tokens: int = 12) -> LocalEngine:
    return LocalEngine(backbone, temperature=temperature, top_p=1.0, max_new_tokens=max_new_tokens)


def test_greedy_is_the_argmax_continuation(backbone: Backbone) -> None:
    answer = engine(backbone).answer(Request(PROMPT, 1))
    ids = backbone.tokenizer(
        backbone.tokenizer.apply_chat_template([PROMPT[0].as_dict()], tokenize=False, add_generation_prompt=True),
        add_special_tokens=False,
    )["input_ids"]
    tokens = list(ids)
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(backbone.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert answer.text == backbone.tokenizer.decode(tokens[len(ids) :], skip_special_tokens=True)
    assert (answer.reason, answer.prompt_tokens, answer.completion_tokens) == ("length", len(ids), 12)
    assert engine(backbone).answer(Request(PROMPT, 2)) == answer


def test_sampling_is_decided_by_the_seed(backbone: Backbone) -> None:
    sampled = engine(backbone, temperature=1.5)
    one = sampled.answer(Request(PROMPT, 1))
    assert sampled.answer(Request(PROMPT, 2)).text != one.text
    assert sampled.answer(Request(PROMPT, 1)) == one


def test_sampling_at_a_vanishing_temperature_is_greedy(backbone: Backbone) -> None:
    prompt = [1, 9, 8, 7]
    tokens, finish = Sampler(backbone, 1e-6, 1.0).generate(prompt, 20, torch.Generator().manual_seed(0))
    plain = Decoder(backbone).generate(prompt, 20)
    assert tokens == plain.tokens
    assert finish == plain.finish


def test_the_end_token_ends_an_answer_and_is_no_text(backbone: Backbone) -> None:
    free = engine(backbone, max_new_tokens=8)
    third = Decoder(backbone).generate(free._speakers.prompt(Request(PROMPT, 0)), 8).tokens[2]
    before = backbone.eos_ids
    try:
        backbone.eos_ids = (third,)
        for temperature in (0.0, 1e-6):
            answer = engine(backbone, temperature=temperature, max_new_tokens=8).answer(Request(PROMPT, 0))
            assert (answer.reason, answer.completion_tokens) == ("stop", 3)
    finally:
        backbone.eos_ids = before


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_models_context_ends_an_answer_too(backbone: Backbone, temperature: float) -> None:
    answer = engine(backbone, temperature, max_new_tokens=100).answer(asks("x" * (CONTEXT - 20)))
    assert answer.reason == "context"
    assert answer.prompt_tokens + answer.completion_tokens == CONTEXT + 1
    over = engine(backbone, temperature).answer(asks("x" * (CONTEXT + 1)))
    assert (over.text, over.reason, over.completion_tokens) == ("", "context", 0)


def test_a_model_without_a_chat_template_is_refused(backbone: Backbone) -> None:
    template = backbone.tokenizer.chat_template
    try:
        backbone.tokenizer.chat_template = None
        with pytest.raises(DataError, match=r"no chat template; set chat_template to one of vicuna_v1\.1, zephyr"):
            engine(backbone)
        named = LocalEngine(backbone, temperature=0.0, top_p=1.0, max_new_tokens=4, chat_template="zephyr")
        ids = backbone.tokenizer("<|user|>\nSay something.<eos>\n<|assistant|>\n", add_special_tokens=False)[
            "input_ids"
        ]
        assert named.answer(Request(PROMPT, 0)).prompt_tokens == len(ids)
    finally:
        backbone.tokenizer.chat_template = template


@pytest.mark.parametrize(
    ("device", "fast", "expected"),
    [("cpu", True, "bfloat16"), ("cpu", False, "float32"), ("cuda", True, "bfloat16"), ("cuda", False, "float16")],
)
def test_the_fastest_dtype_is_bfloat16_where_the_device_has_it(
    monkeypatch: pytest.MonkeyPatch, device: str, fast: bool, expected: str
) -> None:
    monkeypatch.setattr(local, "has_fast_bf16", lambda asked: fast)
    assert fastest_dtype(torch.device(device)) == expected
