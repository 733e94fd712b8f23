from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_train.checkpoint.load_model import LoadedModel, load_for_decoding
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.schema import EvalConfig
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import TargetModelError
from medusa_train.evaluation.questions import Question, load_benchmark
from medusa_train.evaluation.timed_decoders import GREEDY, build_decoders
from medusa_train.evaluation.timing import SpeedTest
from medusa_train.evaluation.turns import TimedAnswer, Turn
from medusa_train.inference.cuda_graphs import FixedShapeRunner
from medusa_train.inference.decoding_mode import DecodingMode
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.kv_cache import KVCache
from tests.inference.tape import TapeRunner


@pytest.fixture(scope="module")
def subject(run_dir: Path) -> LoadedModel:
    return load_for_decoding(resolve_model(str(run_dir), None, None), "float32")


def speed_test(subject: LoadedModel, max_new_tokens: int) -> SpeedTest:
    return mode_test(subject, GREEDY, max_new_tokens)


def run(test: SpeedTest, questions: Sequence[Question]) -> list[Turn]:
    """Return the turns by question, also those of batches."""
    return sorted(test.run(questions), key=lambda turn: turn.question_id)


def split(turns: list[Turn]) -> tuple[list[Turn], list[Turn]]:
    """Return the turns that were answered, and those that were skipped."""
    return [turn for turn in turns if not turn.skipped], [turn for turn in turns if turn.skipped]


def test_every_decoder_answers_every_turn_and_all_agree(
    subject: LoadedModel, bench_file: Path
) -> None:
    test = speed_test(subject, 24)
    test.warm_up(load_benchmark(str(bench_file)).questions)
    records, skipped = split(run(test, load_benchmark(str(bench_file)).questions))
    assert [(record.question_id, record.turn) for record in records] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]
    for record in records:
        assert record.tree is not None
        # the checkpoint's generation config holds a repetition penalty, which must not reach
        # `generate`
        assert record.tree.tokens == record.plain.tokens == record.answers["generate"].tokens
        assert len(record.plain.tokens) == 24
        assert record.plain.steps == 23
        assert sum(record.tree.accepted) + record.tree.steps == 23
        assert 0 < record.plain.prefill_seconds < record.plain.seconds
    assert [(turn.question_id, turn.turn) for turn in skipped] == [(3, 1), (3, 2)]
    assert skipped[0].prompt_ids == skipped[1].prompt_ids


def test_the_plain_first_answer_is_the_history_of_the_second_turn(
    subject: LoadedModel, bench_file: Path
) -> None:
    first, second = run(speed_test(subject, 12), load_benchmark(str(bench_file)).questions[:1])
    tokenizer = subject.target_model.tokenizer
    answer = tokenizer.decode(list(first.plain.tokens), skip_special_tokens=True).strip()
    assert f"1+1?<assistant>{answer}<eos><user>And 2+2?<assistant>" in tokenizer.decode(
        list(second.prompt_ids)
    )
    assert first.text == answer


def test_a_system_message_begins_every_prompt_of_its_chat() -> None:
    question = Question(1, "c", ("ab", "c"), "", system="xyz")
    records = run(stub_test(99, [], ("plain", "tree")), [question])
    assert [len(record.prompt_ids) for record in records] == [5, 5 + 1 + len(records[0].history)]


class StubChat:
    """A prompt of one token per character."""

    def prompt(self, messages: Any, variables: Any = None) -> list[int]:
        return [1] * sum(len(message.content) for message in messages)

    def opened_reasoning(self, messages: Any, variables: Any = None) -> str:
        return ""


def stub_test(
    context: int,
    order: list[str],
    names: tuple[str, ...],
    answers: dict[str, tuple[int, ...]] | None = None,
) -> SpeedTest:
    class Stub:
        def __init__(self, name: str) -> None:
            self.name = name

        def answer(self, prompts: Any, max_new_tokens: int) -> list[TimedAnswer]:
            order.append(self.name)
            return [TimedAnswer((answers or {}).get(self.name, (5,)), 1.0) for _ in prompts]

    special = {"added_tokens_decoder": {}, "all_special_ids": [], "all_special_tokens": []}
    tokenizer = SimpleNamespace(decode=lambda tokens, **options: "ab", **special)
    target_model: Any = SimpleNamespace(
        tokenizer=tokenizer, max_context=context, eos_ids=frozenset()
    )
    chat: Any = StubChat()
    decoders: Any = {name: Stub(name) for name in names}
    return SpeedTest(target_model, chat, decoders, 4)


def test_the_reported_text_begins_with_the_reasoning_tag_that_the_prompt_opened() -> None:
    """The prompt of the next turn opens it again, so the history has none."""
    test = stub_test(99, [], ("plain", "tree"))
    test._chat.opened_reasoning = lambda messages, variables=None: "<think>\n"
    question = Question(1, "c", ("a", "b"), "")
    for record in test.run([question]):
        assert (record.opened, record.text, record.history) == ("<think>\n", "<think>\nab", "ab")


def test_later_turns_are_asked_after_the_plain_answer_whatever_the_others_say() -> None:
    """All decoders get the same prompts; the reported text is that of the tree."""
    answers = {"plain": (1, 2, 3), "tree": (4,), "generate": (5, 6), "other": (7,)}
    test = stub_test(99, [], tuple(answers), answers)
    test._target_model.tokenizer.decode = lambda tokens, **options: "".join(map(str, tokens))
    seen: list[list[str]] = []
    prompt = StubChat.prompt

    def ask(messages: Any, variables: Any = None) -> list[int]:
        seen.append([message.content for message in messages])
        return prompt(test._chat, messages)  # type: ignore[arg-type]

    test._chat.prompt = ask  # type: ignore[method-assign]
    first, second, third = test.run([Question(1, "a", ("q", "r", "s"), "")])
    assert seen == [["q"], ["q", "123", "r"], ["q", "123", "r", "123", "s"]]
    for record in (first, second, third):
        assert record.tree is not None
        assert (record.text, record.history) == ("4", "123")
        assert (record.tree.tokens, record.plain.tokens) == ((4,), (1, 2, 3))
        assert (record.answers["generate"].tokens, record.answers["other"].tokens) == ((5, 6), (7,))
    assert [record.asked for record in (first, second, third)] == ["q", "r", "s"]


def test_the_decoders_take_turns_in_an_order_that_rotates() -> None:
    order: list[str] = []
    test = stub_test(100, order, ("plain", "generate", "tree"))
    run(test, [Question(1, "a", ("q", "r"), ""), Question(2, "a", ("q",), "")])
    assert [tuple(order[i : i + 3]) for i in (0, 3, 6)] == [
        ("generate", "plain", "tree"),
        ("plain", "tree", "generate"),
        ("tree", "generate", "plain"),
    ]


def test_a_turn_fits_when_prompt_and_answer_together_do() -> None:
    # turn 1 has 6 tokens, turn 2 has 6 + 2 (the answer) + 3; answers take 4
    question = Question(1, "a", ("x" * 6, "y" * 3), "")
    records, skipped = split(run(stub_test(15, [], ("plain", "generate")), [question]))
    assert (len(records), skipped) == (2, [])
    records, skipped = split(run(stub_test(14, [], ("plain", "generate")), [question]))
    assert [(turn.turn, turn.skipped, len(turn.prompt_ids)) for turn in (*records, *skipped)] == [
        (1, False, 6),
        (2, True, 11),
    ]


def bench_questions(count: int) -> list[Question]:
    return [Question(n, "a", (f"Say {'ay ' * n}.", "And oh?"), "") for n in range(count)]


def mode_test(subject: LoadedModel, mode: DecodingMode, max_new_tokens: int = 24) -> SpeedTest:
    target_model, decoders = (
        subject.target_model,
        build_decoders(subject, mode, EvalConfig(prompt_lookup=False), print),
    )
    chat = ChatEncoder(target_model.tokenizer)
    return SpeedTest(target_model, chat, decoders, max_new_tokens, mode.batch_size)


@pytest.mark.parametrize("static", [False, True])
def test_batches_give_the_answers_of_single_rows_and_share_their_time(
    subject: LoadedModel, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = bench_questions(5)
    alone = run(speed_test(subject, 24), questions)
    monkeypatch.setattr(subject.target_model, "step_runner", FixedShapeRunner() if static else None)
    test = mode_test(subject, DecodingMode(batch_size=3))
    assert test.names == ["generate", "plain", "tree"]
    test.warm_up(questions)
    records, skipped = split(run(test, questions))
    assert skipped == []
    assert [(record.question_id, record.turn) for record in records] == [
        (n, turn) for n in range(5) for turn in (1, 2)
    ]
    for record, single in zip(records, alone, strict=True):
        assert record.tree is not None
        assert record.prompt_ids == single.prompt_ids
        assert (
            record.plain.tokens
            == record.answers["generate"].tokens
            == record.tree.tokens
            == single.plain.tokens
        )
        assert record.plain.steps == len(record.plain.tokens) - 1
        assert record.batch == (0 if int(record.question_id) < 3 else 3)
        assert (
            record.plain.rows
            == record.answers["generate"].rows
            == (3 if int(record.question_id) < 3 else 2)
        )
    # an answer that ends before the others of its batch
    assert min(record.plain.steps for record in records) < 23
    for rows in (records[0:6:2], records[6:10:2]):  # the first turns of each batch
        tree = [record.tree for record in rows if record.tree is not None]
        assert sum(answer.passes for answer in tree) == pytest.approx(
            max(answer.steps for answer in tree)
        )
        assert len({answer.seconds for answer in tree}) == 1


@pytest.mark.parametrize(("rows", "warm"), [(1, 1), (2, 2), (3, 1)])
def test_no_graph_is_captured_while_answers_are_timed(
    rows: int, warm: int, subject: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up's answers are shorter, its prompts those of the first turns; batches of three
    leave a last one.
    """
    target_model, runner = subject.target_model, TapeRunner()
    monkeypatch.setattr(target_model, "step_runner", runner)
    context = target_model.max_context + 16
    monkeypatch.setattr(
        TargetModel,
        "new_kv_cache",
        lambda target_model, capacity=0: KVCache(
            target_model.num_layers, max(capacity, context), 16
        ),
    )
    questions = bench_questions(4)
    alone = run(speed_test(subject, 24), questions)
    test = mode_test(subject, DecodingMode(batch_size=rows))
    test.warm_up(questions[:warm])
    test.capture(questions)
    before = runner.captures
    records = run(test, questions)
    assert runner.captures == before > 0
    for record, single in zip(records, alone, strict=True):
        assert record.tree is not None
        assert record.tree.tokens == record.plain.tokens == single.plain.tokens


def test_rows_whose_prompt_does_not_fit_leave_the_batch(
    subject: LoadedModel, bench_file: Path
) -> None:
    questions = load_benchmark(str(bench_file)).questions  # the third one is too long
    records, skipped = split(run(mode_test(subject, DecodingMode(batch_size=3)), questions))
    assert [(record.question_id, record.turn) for record in records] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]
    assert [(turn.question_id, turn.turn) for turn in skipped] == [(3, 1), (3, 2)]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_sampled_answers_repeat_with_their_seed(subject: LoadedModel, batch_size: int) -> None:
    questions = bench_questions(2)

    def tokens(seed: int) -> list[tuple[int, ...]]:
        mode = DecodingMode("sampling", 1.0, 0.9, 40, batch_size=batch_size, seed=seed)
        records = run(mode_test(subject, mode, 12), questions)
        answers = [[record.tree, record.plain, record.answers["generate"]] for record in records]
        return [answer.tokens for row in answers for answer in row if answer is not None]

    first = tokens(1)
    assert tokens(1) == first
    assert tokens(2) != first
    assert first[1] != run(speed_test(subject, 12), questions)[0].plain.tokens


def test_typical_acceptance_is_deterministic_and_its_baseline_samples(subject: LoadedModel) -> None:
    questions = bench_questions(1)
    mode = DecodingMode("typical", 1.0, epsilon=1e-6, delta=1e-6)  # accepts nearly everything
    records = [run(mode_test(subject, replace(mode, seed=seed), 12), questions) for seed in (1, 2)]
    trees = [record[0].tree for record in records]
    assert trees[0] is not None
    assert trees[1] is not None
    assert trees[0].tokens == trees[1].tokens
    assert sum(trees[0].accepted) > trees[0].steps  # the tree has two levels
    assert records[0][0].plain.tokens != records[1][0].plain.tokens


def test_longrope_models_are_refused_in_batches(
    subject: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject.target_model, "rope_switch", 64)
    with pytest.raises(TargetModelError, match="set batch_size: 1"):
        mode_test(subject, DecodingMode(batch_size=2))
