from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from medusa_train.checkpoint.load_model import LoadedModel, load_for_decoding
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import TargetModelError
from medusa_train.evaluation.timed_decoders import (
    GREEDY,
    GenerateDecoder,
    LoopDecoder,
    extra_baselines,
)
from medusa_train.inference.generate import Decoder, Generation
from tests.evaluation.tiny_model import write_target_model


@pytest.fixture(scope="module")
def subject(run_dir: Path) -> LoadedModel:
    return load_for_decoding(resolve_model(str(run_dir), None, None), "float32")


def test_generate_stops_after_the_first_eos(subject: LoadedModel) -> None:
    output = GenerateDecoder(subject.target_model).answer([[1, 50, 60]], 16)[0]
    stop = output.tokens[5]
    stopping = SimpleNamespace(
        device=subject.target_model.device,
        model=subject.target_model.model,
        tokenizer=subject.target_model.tokenizer,
        eos_ids=(stop,),
    )
    again = GenerateDecoder(stopping).answer([[1, 50, 60]], 16)[0]  # type: ignore[arg-type]
    assert again.tokens == output.tokens[: output.tokens.index(stop) + 1]
    GenerateDecoder(subject.target_model)  # puts the target model's own eos back


def test_prompt_lookup_and_assisted_generation_give_the_plain_answer(
    subject: LoadedModel, target_model_dir: Path
) -> None:
    notes: list[str] = []
    cfg = EvalConfig(prompt_lookup=True, assistant_model=str(target_model_dir))
    baselines = extra_baselines(subject.target_model, GREEDY, cfg, notes.append)
    assert list(baselines) == ["prompt_lookup", "assisted"]
    assert notes == []
    prompt = [1, 50, 60, 50, 60, 50]
    plain = Decoder(subject.target_model).generate(list(prompt), 24).tokens
    for decoder in baselines.values():
        answer = decoder.answer([prompt], 24)[0]
        assert list(answer.tokens) == plain
        passes = 0

        def count(*_: object) -> None:
            nonlocal passes
            passes += 1

        hook = subject.target_model.model.register_forward_hook(count)
        decoder.answer([prompt], 24)[0]
        hook.remove()
        assert answer.steps == passes - 1
        assert 1 <= answer.prefill_tokens <= 11
    assert GenerateDecoder(subject.target_model).answer([prompt], 24)[0].steps == 0


def test_tokens_of_the_prefill_do_not_count_as_steps(
    subject: LoadedModel, target_model_dir: Path
) -> None:
    """The target model as its own assistant: every pass accepts all guesses, the first one included."""
    cfg = EvalConfig(prompt_lookup=False, assistant_model=str(target_model_dir))
    assistant = extra_baselines(subject.target_model, GREEDY, cfg, print)["assisted"]
    answer = assistant.answer([[1, 50, 60]], 24)[0]
    assert answer.prefill_tokens > 1
    assert answer.steps >= 1
    whole = assistant.answer([[1, 50, 60]], answer.prefill_tokens)[0]
    assert (len(whole.tokens), whole.steps) == (answer.prefill_tokens, 0)


def test_an_unsupported_baseline_is_left_out_with_a_note(
    subject: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: object, **how: object) -> None:
        raise ValueError("this cache can't be cut back")

    monkeypatch.setattr(subject.target_model.model, "generate", refuses)
    notes: list[str] = []
    cfg = EvalConfig(prompt_lookup=True)
    assert extra_baselines(subject.target_model, GREEDY, cfg, notes.append) == {}
    assert "prompt_lookup" in notes[0]
    assert "can't be cut back" in notes[0]


def test_a_draft_model_with_another_tokenizer_is_an_error(
    subject: LoadedModel, tmp_path: Path
) -> None:
    other = write_target_model(tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8").replace("<bos>", "<start>")
    (other / "tokenizer.json").write_text(text, encoding="utf-8")
    cfg = EvalConfig(prompt_lookup=False, assistant_model=str(other))
    with pytest.raises(TargetModelError, match="its tokenizer differs"):
        extra_baselines(subject.target_model, GREEDY, cfg, print)


def test_rows_of_a_batch_decode_once_all_prompts_are_read() -> None:
    # read in two groups
    outputs = [Generation([1], prefill_seconds=seconds) for seconds in (1.0, 3.0)]
    answers = LoopDecoder(Mock(passes=0, generate_batch=lambda *args, **options: outputs)).answer(
        [[1], [2]], 4
    )
    assert [answer.prefill_seconds for answer in answers] == [1.5, 1.5]  # each row's share
