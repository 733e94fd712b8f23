import json
import sys
from pathlib import Path

import pytest

from medusa_train import hide_secrets
from medusa_train.errors import ConfigError, DataError
from medusa_train.selfdistill.output import OutputWriter
from medusa_train.selfdistill.prompts import Prompt

SETTINGS = {"model": "m", "temperature": 0.3}


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_lines_are_appended_and_a_second_run_knows_them(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out.jsonl"
    with OutputWriter(out, SETTINGS) as writer:
        assert writer.done == set()
        writer.write({"id": "a", "text": "h\u00e9\u2028"})
        writer.drop(dropped("b", "length"))
    with OutputWriter(out, SETTINGS) as writer:
        assert writer.done == {"a", "b"}
        writer.write({"id": "c"})
    assert ids(out) == ["a", "c"]
    assert "h\u00e9\u2028" in out.read_text(encoding="utf-8")
    assert ids(out.with_suffix(".dropped.jsonl")) == ["b"]
    assert json.loads(out.with_suffix(".settings.json").read_text()) == SETTINGS


def test_a_run_that_made_nothing_leaves_nothing(tmp_path: Path) -> None:
    with OutputWriter(tmp_path / "out.jsonl", SETTINGS):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [1, 5, 17])
def test_a_torn_last_line_is_cut_off_and_written_again(tmp_path: Path, cut: int) -> None:
    out = tmp_path / "out.jsonl"
    with OutputWriter(out, SETTINGS) as writer:
        writer.write({"id": "a"})
        before = out.read_bytes()
        writer.write({"id": "b", "text": "long enough to cut"})
    out.write_bytes(out.read_bytes()[:-cut])
    with OutputWriter(out, SETTINGS) as writer:
        assert writer.done == {"a"}
        assert out.read_bytes() == before
        writer.write({"id": "b"})
    assert ids(out) == ["a", "b"]


def test_changed_settings_are_refused_with_the_differences(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with OutputWriter(out, SETTINGS) as writer:
        writer.write({"id": "a"})
    with pytest.raises(ConfigError, match=r"temperature: 0\.3 in the file, 0 now") as caught:
        OutputWriter(out, {"model": "m", "temperature": 0})
    assert "model:" not in str(caught.value)
    assert ids(out) == ["a"]


def test_changed_settings_ask_again_what_earlier_ones_dropped_entirely(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with OutputWriter(out, SETTINGS) as writer:
        writer.drop({"id": "a", "seed_id": "a", "dropped": {"reason": "length", "turns": 1}})
    with OutputWriter(out, SETTINGS) as writer:
        assert writer.done == {"a"}
    with OutputWriter(out, {"model": "m", "temperature": 0}) as writer:
        assert not writer.done
        writer.write({"id": "a"})
    assert ids(out) == ["a"]
    assert '"temperature": 0\n' in out.with_name("out.settings.json").read_text()


def test_a_file_of_unknown_origin_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": "theirs"}')
    with pytest.raises(ConfigError, match="without its settings"):
        OutputWriter(out, SETTINGS)
    assert out.read_text() == '{"id": "theirs"}'
    with pytest.raises(ConfigError, match=r"has to end with \.jsonl"):
        OutputWriter(tmp_path / "out.json", SETTINGS)


def test_a_broken_complete_line_names_file_and_line(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with OutputWriter(out, SETTINGS) as writer:
        writer.write({"id": "a"})
    good = out.read_text()
    for line in ("[1]", '{"id": "b", "messages": [{"role": "user"}]}'):
        out.write_text(f"{good}{line}\n")
        with pytest.raises(DataError, match=r"out\.jsonl:2: not a conversation"):
            OutputWriter(out, SETTINGS)


@pytest.mark.skipif(sys.platform == "win32", reason="no such locks there")
def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with OutputWriter(out, SETTINGS) as writer:
        for settings in (SETTINGS, {"model": "other"}):
            with pytest.raises(DataError, match="another process"):
                OutputWriter(out, settings)
        writer.write({"id": "a"})
    assert ids(out) == ["a"]
    assert json.loads(out.with_suffix(".settings.json").read_text()) == SETTINGS


def test_other_prompts_with_the_ids_of_those_answered_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    said = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "user", "content": "more"},
    ]
    with OutputWriter(out, SETTINGS) as writer:
        writer.write({"id": "81", "messages": said})
    with OutputWriter(out, SETTINGS) as writer:
        writer.check_prompts(
            [Prompt("81", ("one", "else")), Prompt("82", ("two",)), Prompt("83", ())]
        )
        with pytest.raises(ConfigError, match="81 asks 'one', and now 'two'"):
            writer.check_prompts([Prompt("81", ("two",))])


def test_a_prompt_with_a_key_is_masked_and_known_again(tmp_path: Path) -> None:
    hide_secrets.remember("sk-secret-123")
    prompt = Prompt("a", ("what is sk-secret-123?",))
    settings = {**SETTINGS, "heads": "runs/sk-secret-123"}
    try:
        for _ in range(2):
            with OutputWriter(tmp_path / "out.jsonl", settings) as writer:
                writer.check_prompts([prompt])
                if not writer.done:
                    message = {"role": "user", "content": prompt.turns[0]}
                    writer.write({"id": "a", "messages": [message]})
        assert all("secret" not in path.read_text() for path in tmp_path.iterdir())
    finally:
        hide_secrets.forget_and_read_environment()


def dropped(name: str, reason: str) -> dict:
    return {"id": name, "dropped": {"reason": reason, "turns": 1}}


def test_prompts_that_a_server_lost_are_asked_again(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    lost = ["refused", "failed", "empty"]
    with OutputWriter(out, {**SETTINGS, "engine": "openai"}) as writer:
        for reason in lost:
            writer.drop(dropped(reason, reason))
        assert writer.done == set()
        assert len(writer.drop_reasons) == 3
    assert list(tmp_path.iterdir()) == []
    # as earlier versions noted them
    with OutputWriter(out, SETTINGS) as writer:
        for reason in ["length", *lost]:
            writer.drop(dropped(reason, reason))
        assert writer.done == {"length", "refused", "empty"}  # of the model in this process
    settings = {**SETTINGS, "engine": "openai"}
    out.with_suffix(".settings.json").write_text(json.dumps(settings))
    with OutputWriter(out, settings) as writer:
        assert writer.done == {"length"}
        assert writer.drop_reasons == {"length": "length"}
