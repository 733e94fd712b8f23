"""Which keys of self-distillation a file of answers cannot be continued without, and by what models of
the same name are told apart.
"""

from pathlib import Path
from typing import Any

import pytest

from medusa_train.config.load import load_config
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.selfdistill import settings
from medusa_train.selfdistill.settings import output_settings, weights_digest

#: Keys that change a conversation, with another value each.
CHANGING: dict[str, list[str]] = {
    "seed_dataset": ["seed_dataset=b.jsonl"],
    "type": ["type=alpaca"],
    "split": ["split=test"],
    "name": ["name=main"],
    "max_turns": ["max_turns=2"],
    "mode": ["mode=selftalk"],
    "temperature": ["temperature=0.5"],
    "top_p": ["top_p=0.9"],
    "top_k": ["top_k=5"],
    "max_new_tokens": ["max_new_tokens=9"],
    "drop_truncated": ["drop_truncated=false"],
    "drop_looping": ["drop_looping=false"],
    "seed": ["seed=1"],
    "engine": ["server_url=http://localhost:1/v1"],
    "base_model": ["base_model=other"],
    "chat_template": ["chat_template=chatml"],
    "chat_template_kwargs": ["chat_template_kwargs={enable_thinking: false}"],
    "special_tokens": ["special_tokens={eos_token: <x>}"],
    "reasoning_tags": ["reasoning_tags=[<r>, </r>]"],
    "heads": ["heads=run"],
}
#: Keys that choose prompts, or say how answers come about and not what they are.
OTHERS = {
    *("skip_bad_records", "turns_per_chat", "min_chars", "max_chars"),
    *("sample", "sample_seed", "limit"),
    *("trust_remote_code", "batch_size", "compile", "output"),
    *("server_url", "concurrency", "request_timeout", "retry_seconds", "api_key_env"),
}
#: Told apart by other means: only in self-talk, and resolved before.
ELSEWHERE = {"rounds", "dtype"}


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end tokens of a model are read from its files."""
    monkeypatch.setattr(settings, "_added_stop_tokens", lambda cfg: None)


def settings_of(*words: str, dtype: str | None = "float32") -> dict[str, Any]:
    own = ["seed_dataset=a.jsonl", "base_model=m", *words]
    return output_settings(load_config(SelfDistillConfig, None, own), dtype)


@pytest.mark.parametrize("key", CHANGING)
def test_a_key_that_changes_a_conversation_is_in_the_settings_of_its_file(key: str) -> None:
    assert settings_of(*CHANGING[key]) != settings_of()


def test_a_key_is_known_to_change_conversations_or_not() -> None:
    assert {*CHANGING, *OTHERS, *ELSEWHERE} == set(SelfDistillConfig.model_fields)
    assert settings_of("mode=selftalk", "rounds=2") != settings_of("mode=selftalk")
    assert settings_of(dtype="bfloat16") != settings_of()
    assert settings_of("limit=3", "sample=5", "batch_size=2") == settings_of()


FILES = [
    "model-00001-of-00002.safetensors",
    "pytorch_model.bin",
    "adapter/adapter_model.safetensors",
    "adapter/adapter_model.bin",
    "heads/medusa_lm_head.safetensors",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("key", ["base_model", "heads"])
def test_weights_that_were_trained_again_are_others(key: str, name: str, tmp_path: Path) -> None:
    for file in FILES:
        path = tmp_path / "merged" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.encode())
    words = [f"{key}={tmp_path / 'merged'}", "seed_dataset=a.jsonl"]
    cfg = load_config(SelfDistillConfig, None, words)
    before = weights_digest(cfg)
    assert before is not None
    assert weights_digest(cfg) == before
    (tmp_path / "merged" / name).write_bytes(b"trained again")
    assert weights_digest(cfg) != before


def test_the_weights_of_a_server_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"trained")
    words = [f"base_model={tmp_path}", "seed_dataset=a.jsonl", "server_url=http://localhost:1/v1"]
    assert weights_digest(load_config(SelfDistillConfig, None, words)) is None
