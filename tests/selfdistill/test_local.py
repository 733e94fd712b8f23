import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.checkpoint.load_model import LoadedModel, load_for_decoding
from medusa_train.config.load import load_config
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.data.builtin_templates import get_template
from medusa_train.data.conversation import Message
from medusa_train.errors import DataError
from medusa_train.inference.batch_decoder import BatchDecoder, RunningBatch
from medusa_train.inference.generate import Decoder, Generation
from medusa_train.inference.sampling import Sampling
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.loading import load_target_model
from medusa_train.models.target_model import TargetModel
from medusa_train.selfdistill import local
from medusa_train.selfdistill.chat_prompting import ChatPrompting
from medusa_train.selfdistill.local import HFEngine, open_local
from medusa_train.selfdistill.replay import ChatRequest, GeneratedAnswer
from medusa_train.trees.tree import Tree
from tests.evaluation.tiny_model import CONTEXT, write_run, write_target_model
from tests.inference.test_static_batches import CountingRunner

PROMPT = (Message("user", "Say something."),)


def asks(text: str) -> ChatRequest:
    return ChatRequest((Message("user", text),), seed=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_model(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module")
def target_model(directory: Path) -> TargetModel:
    return load_target_model(str(directory), dtype=torch.float64)


def engine(
    target_model: TargetModel,
    temperature: float = 0.0,
    max_new_tokens: int = 12,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    draft: MedusaDraft | None = None,
    tree: Tree | None = None,
    chat_template: str | None = None,
    **settings: Any,
) -> HFEngine:
    return HFEngine(
        BatchDecoder(target_model, draft, tree),
        ChatPrompting(target_model.tokenizer, chat_template),
        Sampling(temperature, top_k, top_p) if temperature else None,
        max_new_tokens,
        **settings,
    )


def ask(answering: HFEngine, request: ChatRequest) -> GeneratedAnswer:
    answering.submit(5, request)
    request_id, made = answering.next()
    assert request_id == 5
    return made


def test_a_chat_that_the_template_does_not_take_is_refused_and_others_go_on(
    target_model: TargetModel,
) -> None:
    demanding = copy.copy(target_model)
    demanding.tokenizer = copy.deepcopy(target_model.tokenizer)
    refusal = "{% if messages[0].content == 'a' %}{{ raise_exception('not that') }}{% endif %}"
    demanding.tokenizer.chat_template = refusal + demanding.tokenizer.chat_template
    answering = engine(demanding, batch_size=2)
    answering.submit(1, asks("a"))
    answering.submit(2, ChatRequest(PROMPT, seed=0))
    made = dict(answering.next() for _ in range(2))
    assert made[1] == GeneratedAnswer("", "refused", 0, 0)
    assert made[2].completion_tokens > 0


def test_greedy_is_the_argmax_continuation(target_model: TargetModel) -> None:
    answer = ask(engine(target_model), ChatRequest(PROMPT, 1))
    ids = target_model.tokenizer(
        target_model.tokenizer.apply_chat_template(
            [PROMPT[0].as_dict()], tokenize=False, add_generation_prompt=True
        ),
        add_special_tokens=False,
    )["input_ids"]
    tokens = list(ids)
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(target_model.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert answer.text == target_model.tokenizer.decode(
        tokens[len(ids) :], skip_special_tokens=True
    )
    assert (answer.finish_reason, answer.prompt_tokens, answer.completion_tokens) == (
        "length",
        len(ids),
        12,
    )
    assert ask(engine(target_model), ChatRequest(PROMPT, 2)) == answer


def test_the_end_token_ends_an_answer_and_is_no_text(target_model: TargetModel) -> None:
    free = engine(target_model, max_new_tokens=8)
    third = (
        Decoder(target_model).generate(free._prompting.prompt(ChatRequest(PROMPT, 0)), 8).tokens[2]
    )
    before = target_model.eos_ids
    try:
        target_model.eos_ids = (third,)
        for temperature in (0.0, 1e-6):
            answer = ask(
                engine(target_model, temperature=temperature, max_new_tokens=8),
                ChatRequest(PROMPT, 0),
            )
            assert (answer.finish_reason, answer.completion_tokens) == ("stop", 3)
    finally:
        target_model.eos_ids = before


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_models_context_ends_an_answer_too(
    target_model: TargetModel, temperature: float
) -> None:
    answer = ask(engine(target_model, temperature, max_new_tokens=100), asks("x" * (CONTEXT - 20)))
    assert answer.finish_reason == "context"
    assert answer.prompt_tokens + answer.completion_tokens == CONTEXT + 1
    over = ask(engine(target_model, temperature), asks("x" * (CONTEXT + 1)))
    assert (over.text, over.finish_reason, over.completion_tokens) == ("", "context", 0)


def test_the_keys_of_answers_reach_the_engine(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}

    def record(
        decoder: BatchDecoder,
        prompting: ChatPrompting,
        sampling: Sampling | None,
        max_new_tokens: int,
        **settings: Any,
    ) -> None:
        template = prompting.encoder.template
        made.update(settings, sampling=sampling, max_new_tokens=max_new_tokens)
        made.update(source=template.source, kwargs=template.kwargs, tags=template.reasoning_tags)
        made.update(draft=decoder.draft)

    monkeypatch.setattr(local, "HFEngine", record)
    keys = {
        "base_model": str(directory),
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 7,
        "max_new_tokens": 9,
        "batch_size": 3,
        "chat_template": "vicuna_v1.1",
        "chat_template_kwargs": {"a": 1},
        "reasoning_tags": ["<r>", "</r>"],
        "drop_looping": False,
    }
    cfg = load_config(SelfDistillConfig, None, flags={"seed_dataset": "a.jsonl", **keys})
    open_local(cfg, "float32", lambda note: None)
    assert made == {
        "batch_size": 3,
        "stop_looping": False,
        "sampling": Sampling(0.5, 7, 0.8),
        "max_new_tokens": 9,
        "source": get_template("vicuna_v1.1"),
        "kwargs": {"a": 1},
        "tags": ("<r>", "</r>"),
        "draft": None,
    }


def test_a_model_without_a_chat_template_is_refused(target_model: TargetModel) -> None:
    template = target_model.tokenizer.chat_template
    try:
        target_model.tokenizer.chat_template = None
        with pytest.raises(
            DataError, match=r"no chat template; set chat_template to one of vicuna_v1\.1, zephyr"
        ):
            engine(target_model)
        named = engine(target_model, max_new_tokens=4, chat_template="zephyr")
        ids = target_model.tokenizer(
            "<|user|>\nSay something.<eos>\n<|assistant|>\n", add_special_tokens=False
        )["input_ids"]
        assert ask(named, ChatRequest(PROMPT, 0)).prompt_tokens == len(ids)
    finally:
        target_model.tokenizer.chat_template = template


QUESTIONS = [f"{'why ' * (n % 5)}question {n}" for n in range(11)]


def all_answers(answering: HFEngine) -> list[GeneratedAnswer]:
    """Answers to all questions, in their order, with as many at hand as the engine wants."""
    found: dict[int, GeneratedAnswer] = {}
    coming = list(enumerate(QUESTIONS))[::-1]
    while len(found) < len(QUESTIONS):
        while coming and len(QUESTIONS) - len(coming) - len(found) < answering.capacity:
            number, text = coming.pop()
            answering.submit(number, ChatRequest((Message("user", text),), seed=100 + number))
        request_id, answer = answering.next()
        found[request_id] = answer
    return [found[number] for number in range(len(QUESTIONS))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_do_not_depend_on_the_batch(
    directory: Path, dtype: torch.dtype, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_model = load_target_model(str(directory), dtype=dtype)
    sizes: list[int] = []
    step = RunningBatch.step

    def counted(self: RunningBatch) -> list[tuple[int, Generation]]:
        sizes.append(len(self.active))
        return step(self)

    monkeypatch.setattr(RunningBatch, "step", counted)
    alone = all_answers(engine(target_model, temperature, 40))
    assert max(sizes) == 1
    sizes.clear()
    assert len({answer.text for answer in alone}) > 5
    assert all_answers(engine(target_model, temperature, 40, batch_size=4)) == alone
    assert max(sizes) == 4
    if temperature:
        sampling = engine(target_model, temperature, 40)
        assert ask(sampling, ChatRequest(PROMPT, 1)) != ask(sampling, ChatRequest(PROMPT, 2))
        limited = engine(target_model, temperature, 40, top_k=3, top_p=0.9)
        assert all_answers(limited) != alone
        assert all_answers(
            engine(target_model, temperature, 40, top_k=3, top_p=0.9, batch_size=3)
        ) == all_answers(limited)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_answers_that_loop_end_early_and_others_stay(
    target_model: TargetModel,
    temperature: float,
    batch_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loops(text: str) -> bool:  # random text of a random model does not repeat words
        return text.count(text[:1]) > 2

    monkeypatch.setattr(local, "is_looping", loops)
    monkeypatch.setattr(local, "LOOP_INTERVAL", 4)
    settings: dict[str, Any] = {"temperature": temperature, "max_new_tokens": 40}
    settings["batch_size"] = batch_size
    whole, cut = (
        all_answers(engine(target_model, **settings, stop_looping=stop)) for stop in (False, True)
    )
    expected = [loops(answer.text) for answer in whole]
    assert {loops(answer.text) for answer in whole} == {False, True}
    assert [loops(answer.text) for answer in cut] == expected
    assert all(before.text.startswith(after.text) for before, after in zip(whole, cut, strict=True))
    assert all(
        loop or before == after for loop, before, after in zip(expected, whole, cut, strict=True)
    )
    assert any(before != after for before, after in zip(whole, cut, strict=True))


def test_the_oldest_request_is_among_those_that_join(target_model: TargetModel) -> None:
    batched = engine(target_model, max_new_tokens=4, batch_size=2)
    for number, length in enumerate((3, 50, 4, 5)):
        batched.submit(number, asks("x" * length))
    order = []
    for number in range(4, 14):
        order.append(batched.next()[0])
        batched.submit(number, asks("x" * 4))  # always nearer in length than the second one
    assert 1 in order[:4]


def mixed_lengths(directory: Path) -> TargetModel:
    """A target model whose answers to QUESTIONS end at different moments."""
    target_model = load_target_model(str(directory), dtype=torch.float64)
    free = [
        Decoder(target_model)
        .generate(engine(target_model)._prompting.prompt(asks(q)), 24, ())
        .tokens
        for q in QUESTIONS
    ]
    target_model.eos_ids = tuple({free[0][3], free[4][8], free[7][15]})
    return target_model


def test_batches_with_heads_are_refilled(directory: Path) -> None:
    target_model = mixed_lengths(directory)
    plain = all_answers(engine(target_model, max_new_tokens=24))
    assert len({answer.completion_tokens for answer in plain}) > 3
    draft = MedusaDraft.from_target_model(target_model, num_heads=2)
    batched = engine(
        target_model, max_new_tokens=24, draft=draft, tree=Tree.cartesian([2, 2]), batch_size=4
    )
    assert all_answers(batched) == plain
    assert set(batched.stats()) == {"tokens per step"}
    assert batched.steps > 2 * batched._decoder.passes
    assert batched.step_tokens == sum(answer.completion_tokens - 1 for answer in plain)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_steps_on_fixed_memory_give_the_same_answers(
    directory: Path, temperature: float, batch_size: int
) -> None:
    target_model = mixed_lengths(directory)
    draft, tree = MedusaDraft.from_target_model(target_model, num_heads=2), Tree.cartesian([2, 2])

    def both() -> list[list[GeneratedAnswer]]:
        plain = engine(target_model, temperature, 24, batch_size=batch_size)
        heads = engine(target_model, temperature, 24, batch_size=batch_size, draft=draft, tree=tree)
        return [all_answers(plain), all_answers(heads)]

    expected = both()
    assert temperature or expected[0] == expected[1]
    runner = target_model.step_runner = CountingRunner()
    assert both() == expected
    assert {key[0] for key in runner.keys} >= ({1} if batch_size == 1 else {2, 3})


@pytest.mark.parametrize(
    ("dtype", "heads", "rows"),
    [("float32", False, 1), ("bfloat16", False, 16), ("bfloat16", True, 1)],
)
def test_answers_in_float32_and_those_with_heads_are_generated_alone_by_default(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    heads: bool,
    rows: int,
) -> None:
    """Float32 answers are the same on any machine, so nothing is prepacked either."""
    found: dict[str, object] = {}

    def record(*args: object, batch_size: int, **settings: object) -> None:
        found["rows"] = batch_size

    def load(*args: Any, prepack: bool) -> LoadedModel:
        found["prepack"] = prepack
        return load_for_decoding(*args, prepack=prepack)

    monkeypatch.setattr(local, "HFEngine", record)
    monkeypatch.setattr(local, "load_for_decoding", load)
    keys = {"base_model": str(directory)}
    if heads:
        keys = {"heads": str(write_run(tmp_path / "run", directory))}
    cfg = load_config(SelfDistillConfig, None, flags={"seed_dataset": "a.jsonl", **keys})
    open_local(cfg, dtype, lambda note: None)
    assert found == {"rows": rows, "prepack": dtype != "float32"}
