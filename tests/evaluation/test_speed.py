from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_train.checkpoint.load_model import LoadedModel, load_with_draft
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import BackboneError, DataError
from medusa_train.evaluation.questions import Question, load_bench
from medusa_train.evaluation.records import SkippedTurn, TimedAnswer
from medusa_train.evaluation.speed import (
    GenerateAnswerer,
    SlowStepDetector,
    SpeedTest,
    describe_baseline,
    extra_baselines,
)
from medusa_train.inference.generate import Decoder
from tests.evaluation.tiny_model import write_backbone


@pytest.fixture(scope="module")
def subject(run_dir: Path) -> LoadedModel:
    return load_with_draft(resolve_model(str(run_dir), None, None), "float32")


def speed_test(subject: LoadedModel, max_new_tokens: int) -> SpeedTest:
    return SpeedTest(subject, ChatEncoder(subject.backbone.tokenizer), max_new_tokens)


def test_every_decoder_answers_every_turn_and_all_agree(subject: LoadedModel, bench_file: Path) -> None:
    turns_seen: list[Any] = []
    test = speed_test(subject, 24)
    test.warm_up(load_bench(str(bench_file)).questions)
    records, skipped = test.run(load_bench(str(bench_file)).questions, turns_seen.append)
    assert [(record.question_id, record.turn) for record in records] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for record in records:
        assert record.tree is not None
        # the checkpoint's generation config holds a repetition penalty, which must not reach `generate`
        assert record.tree.tokens == record.plain.tokens == record.generate.tokens
        assert len(record.plain.tokens) == 24
        assert record.plain.steps == 23
        assert sum(record.tree.accepted) + record.tree.steps == 23
        assert 0 < record.plain.prefill_seconds < record.plain.seconds
    assert skipped == [SkippedTurn(3, 1, skipped[0].prompt_tokens), SkippedTurn(3, 2, skipped[0].prompt_tokens)]
    assert turns_seen == [*records, *skipped]


def test_the_plain_first_answer_is_the_history_of_the_second_turn(subject: LoadedModel, bench_file: Path) -> None:
    first, second = speed_test(subject, 12).run(load_bench(str(bench_file)).questions[:1], lambda turn: None)[0]
    tokenizer = subject.backbone.tokenizer
    answer = tokenizer.decode(list(first.plain.tokens), skip_special_tokens=True).strip()
    text = tokenizer.decode(list(second.prompt_ids))
    assert f"1+1?<assistant>{answer}<eos><user>And 2+2?<assistant>" in text
    assert first.text == answer


class StubChat:
    """A prompt of one token per character."""

    def prompt(self, messages: Any) -> list[int]:
        return [1] * sum(len(message.content) for message in messages)


def stub_test(context: int, order: list[str], names: tuple[str, ...]) -> SpeedTest:
    class Stub:
        def __init__(self, name: str) -> None:
            self.name = name

        def answer(self, prompt_ids: Any, max_new_tokens: int) -> TimedAnswer:
            order.append(self.name)
            return TimedAnswer((5,), 1.0)

    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: "ab")
    test: Any = SpeedTest.__new__(SpeedTest)
    test._backbone = SimpleNamespace(tokenizer=tokenizer, max_context=context)
    test._chat, test._max_new_tokens = StubChat(), 4
    test._answerers = {name: Stub(name) for name in names}
    return test


def test_the_decoders_take_turns_in_an_order_that_rotates() -> None:
    order: list[str] = []
    test = stub_test(100, order, ("plain", "generate", "tree"))
    test.run([Question(1, "a", ("q", "r"), ""), Question(2, "a", ("q",), "")], lambda turn: None)
    assert [tuple(order[i : i + 3]) for i in (0, 3, 6)] == [
        ("generate", "plain", "tree"),
        ("plain", "tree", "generate"),
        ("tree", "generate", "plain"),
    ]


def test_a_turn_fits_when_prompt_and_answer_together_do() -> None:
    # turn 1 has 6 tokens, turn 2 has 6 + 2 (the answer) + 3; answers take 4
    question = Question(1, "a", ("x" * 6, "y" * 3), "")
    records, skipped = stub_test(15, [], ("plain", "generate")).run([question], lambda turn: None)
    assert (len(records), skipped) == (2, [])
    records, skipped = stub_test(14, [], ("plain", "generate")).run([question], lambda turn: None)
    assert (len(records), skipped) == (1, [SkippedTurn(1, 2, 11)])


def test_if_no_question_fits_the_error_says_why() -> None:
    with pytest.raises(DataError, match=r"context of 9 tokens: 4 are reserved.*shortest prompt has 6"):
        stub_test(9, [], ("plain",)).run([Question(1, "a", ("x" * 6,), "")], lambda turn: None)


def test_without_a_draft_only_the_baselines_answer(subject: LoadedModel, bench_file: Path) -> None:
    test = speed_test(LoadedModel(subject.backbone, None, None), 4)
    record = test.run(load_bench(str(bench_file)).questions[:1], lambda turn: None)[0][0]
    assert record.tree is None
    assert record.answer is record.plain
    assert record.plain.tokens == record.generate.tokens


def test_completed_questions_are_not_asked_again() -> None:
    order: list[str] = []
    questions = [Question(number, "a", ("q",), "") for number in (1, 2, 3)]
    test = stub_test(100, order, ("plain", "generate"))
    whole = test.run(questions, lambda turn: None)[0]
    order.clear()
    turns_seen: list[Any] = []
    measured = {2: [whole[1]], 3: [SkippedTurn(3, 1, 50)]}
    records, skipped = test.run(questions, turns_seen.append, measured)
    assert [record.question_id for record in records] == [1, 2]
    assert records[1] is whole[1]
    assert skipped == [SkippedTurn(3, 1, 50)]
    assert len(order) == 2
    assert turns_seen == records[:1]


def test_extra_baselines_take_turns_too(subject: LoadedModel, bench_file: Path) -> None:
    lookup = GenerateAnswerer(subject.backbone, prompt_lookup_num_tokens=3)
    test = SpeedTest(subject, ChatEncoder(subject.backbone.tokenizer), 12, {"prompt_lookup": lookup})
    record = test.run(load_bench(str(bench_file)).questions[:1], lambda turn: None)[0][0]
    assert record.others["prompt_lookup"].tokens == record.plain.tokens
    assert list(record.baselines) == ["plain", "generate", "prompt_lookup"]
    assert record.asked == "1+1?"


def plain(step_ms: float, steps: int = 20) -> TimedAnswer:
    return TimedAnswer((1,) * (steps + 1), 1.0 + step_ms * steps / 1000, 1.0, steps)


@pytest.mark.parametrize(
    ("steps_ms", "expected"),
    [
        ([10, 12, 11, 14, 20, 25], None),  # longer prompts
        ([10, 12, 90, 11, 12], None),  # one pause
        ([10, 12, 90, 48, 12], "decoding steps are 4x slower than at the start: another process may be using the CPU"),
        ([60, 55, 10, 11], "decoding steps were 5x slower at the start"),
        ([10], None),
    ],
)
def test_steps_that_become_several_times_slower_are_noticed_once(steps_ms: list[float], expected: str | None) -> None:
    detector = SlowStepDetector("cpu")
    notes = [note for ms in steps_ms if (note := detector.observe(plain(ms))) is not None]
    assert notes == detector.notes
    assert len(notes) == (expected is not None)
    assert expected is None or notes[0].startswith(expected)


def test_answers_of_a_few_steps_do_not_count() -> None:
    detector = SlowStepDetector("cuda")
    for ms in (10, 11, 90, 95):
        assert detector.observe(plain(ms, steps=3)) is None


def test_generate_stops_after_the_first_eos(subject: LoadedModel) -> None:
    output = GenerateAnswerer(subject.backbone).answer([1, 50, 60], 16)
    stop = output.tokens[5]
    stopping = SimpleNamespace(
        device=subject.backbone.device,
        model=subject.backbone.model,
        tokenizer=subject.backbone.tokenizer,
        eos_ids=(stop,),
    )
    again = GenerateAnswerer(stopping).answer([1, 50, 60], 16)  # type: ignore[arg-type]
    assert again.tokens == output.tokens[: output.tokens.index(stop) + 1]
    GenerateAnswerer(subject.backbone)  # puts the backbone's own eos back


def test_prompt_lookup_and_assisted_generation_give_the_plain_answer(subject: LoadedModel, backbone_dir: Path) -> None:
    notes: list[str] = []
    baselines = extra_baselines(subject.backbone, str(backbone_dir), prompt_lookup=True, note=notes.append)
    assert list(baselines) == ["prompt_lookup", "assisted"]
    assert notes == []
    prompt = [1, 50, 60, 50, 60, 50]
    plain = Decoder(subject.backbone).generate(list(prompt), 24).tokens
    for answerer in baselines.values():
        assert list(answerer.answer(prompt, 24).tokens) == plain


def test_no_extra_baselines_without_draft_model_and_prompt_lookup(subject: LoadedModel) -> None:
    assert extra_baselines(subject.backbone, None, prompt_lookup=False, note=print) == {}


def test_an_unsupported_baseline_is_left_out_with_a_note(subject: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object, **how: object) -> None:
        raise ValueError("this cache can't be cut back")

    monkeypatch.setattr(subject.backbone.model, "generate", refuses)
    notes: list[str] = []
    assert extra_baselines(subject.backbone, None, prompt_lookup=True, note=notes.append) == {}
    assert "prompt_lookup" in notes[0]
    assert "can't be cut back" in notes[0]


def test_a_draft_model_with_another_tokenizer_is_an_error(subject: LoadedModel, tmp_path: Path) -> None:
    other = write_backbone(tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8").replace("<bos>", "<start>")
    (other / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(BackboneError, match="its tokenizer differs"):
        extra_baselines(subject.backbone, str(other), prompt_lookup=False, note=print)


def test_descriptions_of_baselines() -> None:
    assert (
        describe_baseline("assisted", "5.0", "small/one")
        == "transformers 5.0 assisted generation, greedy, with small/one"
    )
    assert "copied per step" in describe_baseline("prompt_lookup", "5.0", None)
