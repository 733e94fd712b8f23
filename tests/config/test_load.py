from pathlib import Path

import pytest
from pydantic import ValidationError

from medusa_train.config.keys import Config
from medusa_train.config.load import dump_config, load_config
from medusa_train.config.removed_keys import REMOVED_KEYS
from medusa_train.config.schema import (
    IGNORED_AXOLOTL_KEYS,
    EvalConfig,
    ExportConfig,
    SelfDistillConfig,
    TrainConfig,
)
from medusa_train.config.types import CHAT_TEMPLATES
from medusa_train.data.builtin_templates import TEMPLATES
from medusa_train.errors import ConfigError

GOOD = "base_model: data/tiny\ndatasets:\n  - path: a.jsonl\n"
REQUIRED = ("base_model=data/tiny", "datasets=[{path: a.jsonl}]")


def write(directory: Path, text: str) -> Path:
    path = directory / "x.yaml"
    path.write_text(text)
    return path


def problems(path: Path | None, *overrides: str) -> list[str]:
    """The problems of a training configuration, with the file's directory cut off."""
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, path, overrides)
    return [
        problem.replace(f"{path.parent}/", "") if path and path.is_absolute() else problem
        for problem in caught.value.problems
    ]


def test_a_combination_names_both_places_and_waits_for_usable_values(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "load_in_8bit: true\nseed: 1\nload_in_4bit: true\n")
    assert problems(path) == [
        "x.yaml:6: load_in_4bit: true: cannot be set together with load_in_8bit; choose one"
        " (load_in_8bit: x.yaml:4)"
    ]
    path = write(tmp_path, GOOD + "adapter: qlora\nload_in_4bit: perhaps\n")
    assert problems(path) == ["x.yaml:5: load_in_4bit: expected true or false, got 'perhaps'"]


def test_missing_keys_show_beside_other_mistakes(tmp_path: Path) -> None:
    found = problems(write(tmp_path, "seed: x\nwarmup_steps: 4\nwarmup_ratio: 0.1\n"))
    assert found[0] == "x.yaml:1: seed: expected an integer, got 'x'"
    assert found[1].startswith(
        "x.yaml:2: warmup_steps: 4: cannot be set together with warmup_ratio"
    )
    assert found[2].startswith("x.yaml: base_model: is missing (")
    assert found[3].startswith("x.yaml: datasets: is missing (")
    assert len(found) == 4


def test_nested_mistakes_have_lines_and_nearest_keys(tmp_path: Path) -> None:
    path = write(
        tmp_path, "base_model: m\ndatasets:\n  - pth: a\n    type: sharegtp\n  - just-a-path\n  -\n"
    )
    assert problems(path) == [
        "x.yaml:3: datasets[0].path: is missing",
        "x.yaml:3: datasets[0].pth: unknown key; did you mean path?",
        "x.yaml:4: datasets[0].type: must be auto, sharegpt, messages or alpaca, got 'sharegtp'",
        "x.yaml:6: datasets[2]: expected `key: value` lines, got null",
    ]
    recent = write(
        tmp_path,
        "base_model: m\ndatasets: [{path: a, type: chat_template, train_on_eos: turn}]\n",
    )
    assert "train_on_eos: the end of every answer is trained" in problems(recent)[-1]


def test_the_keys_of_one_dataset_that_is_no_list_have_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "base_model: m\ndatasets:\n  path: a\n  typ: b\n  split: 1.5\n")
    assert problems(path) == [
        "x.yaml:4: datasets[0].typ: unknown key; did you mean type?",
        "x.yaml:5: datasets[0].split: expected text (put it in quotes), got 1.5",
    ]


def test_a_combination_shows_the_value_that_was_written(tmp_path: Path) -> None:
    text = "resume_from_checkpoint: true\noverwrite_output_dir: true\nhydra: {num_heads: 2}\n"
    assert problems(write(tmp_path, GOOD + text)) == [
        "x.yaml:4: resume_from_checkpoint: true: cannot be set together with overwrite_output_dir;"
        " choose one (overwrite_output_dir: x.yaml:5)",
        "x.yaml:6: hydra: belongs to another draft; set draft: hydra, or remove it",
    ]


AXOLOTL = """\
base_model: m
chat_template: tokenizer_default
datasets:
  - path: a
    type: chat_template
    field_messages: chat
    message_property_mappings: {role: speaker, content: text}
    roles:
      user: [customer, human]
      assistant: agent
"""


def test_field_mappings_of_axolotl_are_read(tmp_path: Path) -> None:
    cfg = load_config(TrainConfig, write(tmp_path, AXOLOTL))
    (dataset,) = cfg.datasets
    assert cfg.chat_template is None
    assert (dataset.field_messages, dataset.role_key, dataset.content_key) == (
        "chat",
        "speaker",
        "text",
    )
    assert dataset.roles == {"user": ["customer", "human"], "assistant": ["agent"]}
    again = write(tmp_path, dump_config(cfg))
    assert load_config(TrainConfig, again).datasets == cfg.datasets


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "message_property_mappings: {rol: a}",
            "message_property_mappings.rol: must be role or content, got 'rol'",
        ),
        ("message_property_mappings: {role: [a]}", "role: expected text (put it in quotes)"),
        ("roles: {bot: [gpt]}", "roles.bot: must be system, user, assistant or tool, got 'bot'"),
        ("roles: {user: [a], assistant: [a]}", "a is listed as user, too"),
        ("roles: [user]", "expected a mapping such as {name: value}, got a list"),
        ("conversation: chatlm", "unknown; did you mean chatml?"),
        ("type: alpaca\n    field_messages: m", "alpaca has no turns"),
        (
            "message_field_role: a\n    message_property_mappings: {role: b}",
            "both name the role",
        ),
    ],
)
def test_wrong_field_mappings_are_named(line: str, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"base_model: m\ndatasets:\n  - path: a\n    {line}\n")
    (found,) = problems(path)
    assert problem in found
    assert found.startswith("x.yaml:")


def test_the_names_of_chat_templates_are_those_that_there_are() -> None:
    assert set(CHAT_TEMPLATES) == set(TEMPLATES)


def test_a_run_s_own_file_names_its_directory(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.yaml").write_text(GOOD + "output_dir: elsewhere\n")
    assert load_config(TrainConfig, tmp_path / "config.yaml").output_dir == str(tmp_path)
    assert (
        load_config(TrainConfig, tmp_path / "config.yaml", ["output_dir=other"]).output_dir
        == "other"
    )


def test_duplicates_are_refused_beside_what_they_hold(tmp_path: Path) -> None:
    assert problems(write(tmp_path, GOOD + "seed: 1\nseed: two\n")) == [
        "x.yaml:5: seed: is set twice, on lines 4 and 5; keep one",
        "x.yaml:5: seed: expected an integer, got 'two'",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("medusa_num_heads: 0", "medusa_num_heads: must be 1 or more, got 0"),
        ("val_set_size: 1.5", "val_set_size: must be less than 1, got 1.5"),
        ("learning_rate: 0", "learning_rate: must be more than 0, got 0"),
        ("medusa_decay_coefficient: 2", "medusa_decay_coefficient: must be 1 or less, got 2"),
        (
            "lr_scheduler: cosin",
            "lr_scheduler: must be cosine, linear, constant or constant_with_warmup, got 'cosin'",
        ),
        ("roles_to_train: []", "roles_to_train: needs 1 or more items, got a list"),
        ("roles_to_train: assistant", "roles_to_train: expected a list, got 'assistant'"),
        (
            "lora_target_modules: [1.5]",
            "lora_target_modules[0]: expected text (put it in quotes), got 1.5",
        ),
        ("gibberish_xyz: 3", "gibberish_xyz: unknown key; see docs/reference/configuration.md"),
        ("3: 4", "3: unknown key; see docs/reference/configuration.md"),
    ],
)
def test_bad_values_say_what_is_allowed(tmp_path: Path, line: str, message: str) -> None:
    assert problems(write(tmp_path, f"{GOOD}{line}\n")) == [f"x.yaml:4: {message}"]


def test_exponents_and_nulls_are_read_as_meant(tmp_path: Path) -> None:
    cfg = load_config(
        TrainConfig,
        write(tmp_path, GOOD + "    type:\nlearning_rate: 1e-3\nseed:\nwarmup_steps: ~\n"),
    )
    assert (cfg.learning_rate, cfg.seed, cfg.warmup_steps, cfg.datasets[0].type) == (
        0.001,
        42,
        None,
        "auto",
    )
    assert load_config(TrainConfig, tmp_path / "x.yaml", ["learning_rate="]).learning_rate == 5e-4
    assert problems(write(tmp_path, GOOD.replace("data/tiny", "")))[0].startswith(
        "x.yaml:1: base_model: is missing"
    )


def test_foreign_keys_are_taken_and_listed(tmp_path: Path) -> None:
    text = (
        GOOD + "strict: false\nfsdp:\nwandb_watch: gradients\nmodel_type:"
        " LlamaForCausalLM\nflash_attention: false\n"
    )
    assert load_config(TrainConfig, write(tmp_path, text)).ignored == (
        "model_type",
        "strict",
        "wandb_watch",
    )
    odd = load_config(
        TrainConfig,
        write(tmp_path, GOOD),
        [f"{name}={{odd: [1]}}" for name in IGNORED_AXOLOTL_KEYS],
    )
    assert set(odd.ignored) == IGNORED_AXOLOTL_KEYS


# --- overrides and flags ------------------------------------------------------------------------------------------


def test_overrides_go_over_the_file_and_flags_over_both(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "seed: x\nnum_epochs: 1\n")  # a mistake that an override corrects
    cfg = load_config(
        TrainConfig,
        path,
        [
            "seed=2",
            "learning_rate=5e-4",
            "datasets.0.path=b.jsonl",
            "output_dir=runs/a=b",
            "num_epochs=2",
        ],
        flags={"num_epochs": 3, "max_steps": None},
    )
    assert (cfg.seed, cfg.learning_rate, cfg.datasets[0].path, cfg.output_dir) == (
        2,
        5e-4,
        "b.jsonl",
        "runs/a=b",
    )
    assert (cfg.num_epochs, cfg.max_steps) == (3, None)


@pytest.mark.parametrize("text", ["2024-13-45", "0b_", "a: b: c", "[open", "=", "@home", "%x"])
def test_an_override_that_is_no_yaml_is_text(text: str) -> None:
    assert load_config(EvalConfig, None, [f"bench={text}"]).bench == text


@pytest.mark.parametrize(
    "text",
    [
        "/data/run #3",
        "a # b",
        "#3",
        "&x",
        "*x",
        "!x y",
        "| x",
        "> x",
        "- x",
        "? x",
        "a: b",
        "{x}",
        "[x]",
        "true",
        "yes",
        "1.10",
        "0123",
        "2024-01-02",
        " a ",
        "'",
        '"a',
        "it's",
        "'a' and 'b'",
        "\N{ROCKET} #1",
    ],
)
def test_an_override_of_text_is_taken_as_it_is_typed(text: str) -> None:
    cfg = load_config(
        TrainConfig,
        None,
        [
            f"base_model={text}",
            "datasets=[{path: a}]",
            f"datasets[0].path={text}",
            f"chat_template={text}.jinja",
            f"special_tokens.eos_token={text}",
            "deepspeed.a=1",
        ],
    )
    assert cfg.base_model == text
    assert cfg.datasets[0].path == text
    assert cfg.chat_template == f"{text}.jinja"
    assert cfg.special_tokens == {"eos_token": text}


@pytest.mark.parametrize("text", ["1.10", "true", "[x]"])
def test_an_override_of_text_replaces_a_value_as_it_is_typed(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    overrides = ["wandb_project=p", f"wandb_project={text}"]
    cfg = load_config(
        TrainConfig, path, [f"base_model={text}", f"datasets.0.path={text}", *overrides]
    )
    assert (cfg.base_model, cfg.datasets[0].path, cfg.wandb_project) == (text, text, text)


@pytest.mark.parametrize("text", ["/data/x #3", "&x", "*.jsonl", "a: b", "- x"])
def test_where_a_list_or_a_mapping_may_stand_other_text_is_taken_as_it_is_typed(text: str) -> None:
    cfg = load_config(
        TrainConfig,
        None,
        [
            "base_model=m",
            f"datasets={text}",
            "test_datasets=[{path: json}]",
            f"test_datasets.0.data_files={text}",
            f"lora_target_modules={text}",
            f"deepspeed={text}",
        ],
    )
    assert cfg.datasets[0].path == text
    assert cfg.test_datasets is not None
    assert cfg.test_datasets[0].data_files == [text]
    assert cfg.lora_target_modules == [text]
    assert cfg.deepspeed == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("~", None),
        ("", None),
        ("'x #3'", "x #3"),
        ("'it''s'", "it's"),
        ('"a\\tb"', "a\tb"),
        ('"\\ud83d\\ude80"', "\N{ROCKET}"),
        ("'null'", "null"),
    ],
)
def test_null_and_quotes_around_the_text_of_an_override_are_yaml(
    text: str, value: str | None
) -> None:
    assert load_config(EvalConfig, None, [f"model={text}"]).model == value


@pytest.mark.parametrize("text", ["&5", "#5", "!!null 5"])
def test_a_number_that_yaml_would_read_as_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="limit: expected an integer, got"):
        load_config(EvalConfig, None, [f"limit={text}"])


@pytest.mark.parametrize("text", ["a\udcff", '"a\\ud83d"', '"a\\0b"'])
def test_text_that_no_file_can_hold_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="output_dir: contains characters that are not UTF-8"):
        load_config(EvalConfig, None, [f"output_dir={text}"])
    if text.startswith('"'):
        with pytest.raises(
            ConfigError, match=r"x\.yaml:1: output_dir: contains characters that are not UTF-8"
        ):
            load_config(EvalConfig, write(tmp_path, f"output_dir: {text}\n"))


def test_text_in_lists_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 'base_model: m\ndatasets:\n  - path: a\n  - path: "b\\0"\n')
    (problem,) = problems(path)
    assert problem.startswith("x.yaml:4: datasets[1].path: contains characters that are not UTF-8")


@pytest.mark.parametrize(
    "name",
    ["a" * 300, "b/" + "c" * 300, "e/" * 3000, "\N{ROCKET}" * 64],
    ids=["name", "name below a directory", "path", "bytes of a name"],
)
@pytest.mark.parametrize(
    ("cls", "key"),
    [
        (TrainConfig, "base_model"),
        (TrainConfig, "output_dir"),
        (TrainConfig, "datasets.0.path"),
        (TrainConfig, "dataset_prepared_path"),
        (TrainConfig, "deepspeed"),
        (TrainConfig, "resume_from_checkpoint"),
        (TrainConfig, "stage_one.dataset_prepared_path"),
        (EvalConfig, "tree"),
        (EvalConfig, "rest.datastore"),
        (SelfDistillConfig, "output"),
        (SelfDistillConfig, "seed_dataset"),
        (ExportConfig, "run"),
    ],
)
def test_a_name_that_no_file_can_have_is_an_error_of_its_key(
    cls: type[Config], key: str, name: str
) -> None:
    required = (
        [] if cls is not TrainConfig else [*REQUIRED, "recipe=medusa2", "stage_one.max_steps=3"]
    )
    with pytest.raises(ConfigError) as caught:
        load_config(cls, None, [*required, f"{key}={name}"])
    (problem, *_) = caught.value.problems
    assert problem.startswith(f"override '{key}=")
    assert problem.endswith("is longer than the name of a file can be (255 bytes)")


def test_a_name_of_255_bytes_is_the_name_of_a_file(tmp_path: Path) -> None:
    name = "\N{ROCKET}" * 63 + "abc"
    (tmp_path / name).touch()
    cfg = load_config(EvalConfig, None, [f"bench={tmp_path / name}"])
    assert Path(cfg.bench).exists()


def test_an_emoji_that_json_escapes_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"base_model": "\\ud83d\\ude80", "datasets": "a", "chat_template_kwargs": {"x": "\\ud83d\\ude80"}}',
    )
    cfg = load_config(TrainConfig, path)
    assert cfg.base_model == "\N{ROCKET}"
    assert cfg.chat_template_kwargs == {"x": "\N{ROCKET}"}
    assert dump_config(cfg).encode()


def test_an_override_reaches_into_mappings_that_do_not_exist_yet(tmp_path: Path) -> None:
    cfg = load_config(
        TrainConfig, write(tmp_path, GOOD), ["deepspeed.zero.stage=2", "datasets[0].type=alpaca"]
    )
    assert cfg.deepspeed == {"zero": {"stage": 2}}
    assert cfg.datasets[0].type == "alpaca"


def test_mistakes_in_overrides_and_flags_name_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            EvalConfig,
            None,
            ["limt=3", "a.b=1", "seed", "=3", "bench.x=1"],
            flags={"max_new_tokens": 0},
        )
    assert sorted(caught.value.problems) == [
        "--max-new-tokens: must be 1 or more, got 0",
        "override '=3': overrides are written key=value, or a.b=value",
        "override 'a.b=1': a: unknown key; see docs/reference/configuration.md",
        "override 'bench.x=1': bench: expected text (put it in quotes), got a mapping",
        "override 'limt=3': limt: unknown key; did you mean limit?",
        "override 'seed': overrides are written key=value, or a.b=value",
    ]


def test_what_is_wrong_in_a_list_of_an_override_is_not_a_line_of_the_file(tmp_path: Path) -> None:
    override = "datasets=[{pth: x}]"
    assert problems(write(tmp_path, GOOD), override) == [
        f"override '{override}': datasets[0].path: is missing",
        f"override '{override}': datasets[0].pth: unknown key; did you mean path?",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("datasets.3.path=x", "cannot set datasets[3].path: datasets has 1 items, counted from 0"),
        ("datasets.1={path: x}", "cannot set datasets[1]: datasets has 1 items, counted from 0"),
        ("datasets.path=x", "cannot set datasets.path: datasets has 1 items, counted from 0"),
        ("base_model.x=1", "cannot set base_model.x: base_model is not a mapping"),
        ("datasets.².path=x", "cannot set datasets.².path: datasets has 1 items, counted from 0"),
    ],
)
def test_an_override_that_leads_nowhere_says_so(
    tmp_path: Path, override: str, message: str
) -> None:
    assert problems(write(tmp_path, GOOD), override) == [f"override '{override}': {message}"]


# --- files --------------------------------------------------------------------------------------------------------


def test_a_missing_file_suggests_three_of_the_nearest_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (message,) = problems(Path("configs/tiny-m1.yml"))
    assert message.startswith(
        "configs/tiny-m1.yml: no such file; did you mean configs/tiny_m1.yaml or configs/"
    )
    assert message.count(".yaml") == 3


def test_a_missing_file_without_neighbours_suggests_shipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (message,) = problems(Path("eagle3"))
    assert message.startswith("eagle3: no such file; did you mean configs/")
    assert "configs/any_eagle3.yaml" in message


def test_a_directory_in_place_of_a_file_suggests_its_files(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(
        ConfigError,
        match=r"is a directory, not a YAML file .*by --model.*; did you mean .*/x\.yaml",
    ):
        load_config(TrainConfig, tmp_path)


@pytest.mark.parametrize("cls", [EvalConfig, ExportConfig])
def test_a_training_configuration_given_to_another_command_leads_to_its_run(
    cls: type[Config], tmp_path: Path
) -> None:
    path = write(tmp_path, GOOD + "output_dir: runs/x\n")
    with pytest.raises(ConfigError, match=r"--model runs/x, or medusa-export runs/x") as caught:
        load_config(cls, path)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("name", ["a" * 300, "b/" + "c" * 300 + "/d.yaml", "e/" * 3000, "f\0g"])
def test_a_file_name_that_no_file_can_have_is_no_such_file(name: str) -> None:
    (message,) = problems(Path(name))
    assert message.startswith(f"{Path(name)}: no such file; did you mean configs/")


# --- dump ---------------------------------------------------------------------------------------------------------


def test_a_dump_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    text = (
        GOOD + "learning_rate: 3e-5\nbf16: true\neval_steps: 0.25\nresume_from_checkpoint:"
        " true\nadapter: lora\nchat_template: 'ünïcode: #1.jinja'\ndeepspeed: {zero: {stage: 2}}\n"
    )
    cfg = load_config(TrainConfig, write(tmp_path, text))
    again = load_config(TrainConfig, write(tmp_path, dump_config(cfg)))
    assert again.model_dump() == cfg.model_dump()
    assert dump_config(again) == dump_config(cfg)
    lines = dump_config(cfg).splitlines()
    assert {"recipe: medusa2", "medusa_only_heads: false"} <= set(lines)  # what was derived
    assert not any(line.startswith("warmup_steps") for line in lines)  # what has no value


def test_a_dump_has_no_key_without_effect(tmp_path: Path) -> None:
    """What a run was given in vain is said once, and not again by those that read its file."""
    cfg = load_config(TrainConfig, write(tmp_path, GOOD + "lora_r: 8\ncosine_min_lr_ratio: 0.1\n"))
    assert cfg.ignored == ("lora_r",)
    again = load_config(TrainConfig, write(tmp_path, dump_config(cfg)))
    assert again.ignored == ()
    assert again.cosine_min_lr_ratio == 0.1


def test_environment_variables_in_values_are_expanded_or_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SCRATCH_X", "/scratch/me")
    monkeypatch.delenv("UNSET_X", raising=False)
    path = write(tmp_path, GOOD + "output_dir: ${SCRATCH_X}/run\nwandb_name: a$\n")
    cfg = load_config(TrainConfig, path, ["datasets.0.path=$SCRATCH_X/a.jsonl"])
    assert cfg.output_dir == "/scratch/me/run"
    assert cfg.datasets[0].path == "/scratch/me/a.jsonl"
    assert cfg.wandb_name == "a$"
    assert problems(None, *REQUIRED, "output_dir=${UNSET_X}/run") == [
        "override 'output_dir=${UNSET_X}/run': output_dir: ${UNSET_X}/run: the environment variable"
        " UNSET_X is not set; set it, or write the value"
    ]
    assert "UNSET_X is not set" in problems(None, *REQUIRED, "deepspeed=$UNSET_X/a.json")[0]


def test_a_missing_space_after_a_colon_is_named_and_null_is_a_value() -> None:
    found = problems(None, *REQUIRED, "chat_template_kwargs={enable_thinking:false}")
    assert any("a space is missing after the colon: enable_thinking: false" in x for x in found)
    found = problems(None, *REQUIRED, "deepspeed={zero_optimization: {stage:2}}")
    assert any("a space is missing after the colon: stage: 2" in x for x in found)
    cfg = load_config(TrainConfig, None, [*REQUIRED, "chat_template_kwargs={tools_in: null}"])
    assert cfg.chat_template_kwargs == {"tools_in": None}
    assert "tools_in: null" in dump_config(cfg)


def test_an_unknown_key_of_a_section_is_refused_though_it_is_null() -> None:
    found = problems(None, *REQUIRED, "draft=hydra", "hydra={layerz: null, dropout: null}")
    assert len(found) == 1
    assert "hydra.layerz: unknown key" in found[0]


@pytest.mark.parametrize(
    ("written", "override", "dropped"),
    [
        ("saves_per_epoch: 2", "save_steps=1", "saves_per_epoch"),
        ("save_steps: 2", "saves_per_epoch=1", "save_steps"),
        ("load_in_8bit: true", "load_in_4bit=true", "load_in_8bit"),
        ("max_steps: 7", "num_epochs=3", "max_steps"),
        ("test_datasets: b.jsonl", "val_set_size=0.1", "test_datasets"),
        ("warmup_ratio: 0.1", "warmup_steps=0", "warmup_ratio"),
    ],
)
def test_an_override_replaces_the_other_form_of_its_key(
    tmp_path: Path, written: str, override: str, dropped: str
) -> None:
    cfg = load_config(TrainConfig, write(tmp_path, f"{GOOD}{written}\n"), [override])
    assert not getattr(cfg, dropped)
    assert cfg.ignored == (dropped,)


def test_holding_out_no_part_leaves_the_test_data_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, f"{GOOD}test_datasets: [{{path: b.jsonl}}]\n")
    assert load_config(TrainConfig, path, ["val_set_size=0"]).test_datasets


_SOME_DATA = ["datasets=[{path: d.jsonl}]"]


def test_a_runs_own_file_cannot_allow_code_but_its_user_can(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("base_model: m\ntrust_remote_code: true\n")
    assert load_config(TrainConfig, tmp_path / "own.yaml", _SOME_DATA).trust_remote_code
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    (run / "config.yaml").write_text("base_model: m\ntrust_remote_code: true\n")
    refused = load_config(TrainConfig, run / "config.yaml", _SOME_DATA)
    assert not refused.trust_remote_code
    assert "trust_remote_code" in refused.ignored
    allowed = load_config(TrainConfig, run / "config.yaml", [*_SOME_DATA, "trust_remote_code=true"])
    assert allowed.trust_remote_code
    assert "trust_remote_code" not in allowed.ignored


@pytest.mark.parametrize(
    ("override", "meant"),
    [("lr=1e-3", "learning_rate"), ("heads=3", "medusa_num_heads"), ("bs=3", "micro_batch_size")],
)
def test_short_names_of_other_programs_are_recognized(
    override: str, meant: str, tmp_path: Path
) -> None:
    (problem,) = problems(write(tmp_path, GOOD), override)
    assert problem.endswith(f"unknown key; did you mean {meant}?")


@pytest.mark.parametrize(
    ("cls", "name", "meant"),
    [
        (TrainConfig, "model", "base_model"),
        (ExportConfig, "model", "run"),
        (EvalConfig, "bs", "batch_size"),
        (EvalConfig, "max_length", "max_new_tokens"),
        (SelfDistillConfig, "out", "output"),
    ],
)
def test_a_short_name_stands_for_a_key_of_the_command(
    cls: type[Config], name: str, meant: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(cls, None, [f"{name}=x"])
    assert f"override '{name}=x': {name}: unknown key; did you mean {meant}?" in str(caught.value)


def test_a_switch_is_suggested_where_a_section_has_its_name() -> None:
    with pytest.raises(ConfigError, match="did you mean prompt_lookup"):
        load_config(EvalConfig, None, ["lookup=false"])


def test_a_key_that_stands_twice_in_the_value_of_an_override_is_refused(tmp_path: Path) -> None:
    (problem,) = problems(write(tmp_path, GOOD), "datasets=[{path: a.jsonl, path: b.jsonl}]")
    assert "datasets[0].path: is set twice; keep one" in problem


def test_an_override_that_another_one_replaces_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    cfg = load_config(TrainConfig, path, ["seed=3", "seed=4", "max_steps=2", "max_steps=2"])
    assert cfg.seed == 4
    assert cfg.ignored == ("seed=3",)
    cfg = load_config(TrainConfig, path, ["seed=3"], flags={"seed": 5})
    assert cfg.seed == 5
    assert cfg.ignored == ("seed=3",)


def test_an_override_is_named_that_another_spelling_or_all_of_its_list_replaces(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, GOOD)
    cfg = load_config(TrainConfig, path, ["datasets.0.path=a.jsonl", "datasets[0].path=b.jsonl"])
    assert cfg.datasets[0].path == "b.jsonl"
    assert cfg.ignored == ("datasets.0.path=a.jsonl",)
    cfg = load_config(TrainConfig, path, ["datasets.0.path=a.jsonl", "datasets=[c.jsonl]"])
    assert cfg.datasets[0].path == "c.jsonl"
    assert cfg.ignored == ("datasets.0.path=a.jsonl",)
    # what is set below a list that was given before changes it, and replaces nothing
    cfg = load_config(TrainConfig, path, ["datasets=[{path: c.jsonl}]", "datasets.0.path=a.jsonl"])
    assert cfg.datasets[0].path == "a.jsonl"
    assert cfg.ignored == ()


@pytest.mark.parametrize("value", ["${SCRATCH:-x}/run", "${SCRATCH", "$(date)"])
def test_what_only_a_shell_expands_is_refused(value: str) -> None:
    (problem,) = problems(None, *REQUIRED, f"output_dir={value}")
    assert "only $NAME and ${NAME} are replaced, by environment variables" in problem


def test_an_empty_list_of_files_is_refused() -> None:
    (problem,) = problems(None, REQUIRED[0], "datasets=[{path: d, data_files: []}]")
    assert "data_files: needs 1 or more items" in problem


@pytest.mark.parametrize("value", ["42", "-1", "1.5"])
def test_a_number_in_place_of_prompts_is_taken_for_a_random_seed(value: str) -> None:
    with pytest.raises(ConfigError, match="for the random seed write seed=N"):
        load_config(SelfDistillConfig, None, [f"seed_dataset='{value}'"])


OLD = {"old": "was removed in 9.9: write seed", "bf16: maybe": "maybe is gone; set true"}


@pytest.fixture
def removed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key and a value that an earlier version had."""
    for name, message in OLD.items():
        monkeypatch.setitem(REMOVED_KEYS, name, message)


@pytest.mark.usefixtures("removed_keys")
def test_removed_keys_and_values_are_errors_that_say_what_happened_to_them(tmp_path: Path) -> None:
    assert problems(write(tmp_path, GOOD + "old: 1\nbf16: maybe\n"), "old=2", "seed=x") == [
        "x.yaml:5: bf16: maybe is gone; set true",
        "override 'old=2': old: was removed in 9.9: write seed",
        "override 'seed=x': seed: expected an integer, got 'x'",
    ]


@pytest.mark.usefixtures("removed_keys")
def test_removed_keys_in_stage_one_are_errors(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "adapter: lora\nstage_one:\n  old: 1\n")
    assert problems(path) == ["x.yaml:6: stage_one: old: was removed in 9.9: write seed"]


@pytest.mark.usefixtures("removed_keys")
def test_removed_keys_in_a_runs_own_file_are_ignored_and_listed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    path = tmp_path / "config.yaml"
    path.write_text(GOOD + "old: 1\nbf16: maybe\nstage_one: {old: 2}\n")
    cfg = load_config(TrainConfig, path)
    assert (cfg.ignored, cfg.bf16) == (("bf16", "old", "stage_one.old"), "auto")
    with pytest.raises(ConfigError, match="override 'old=3': old: was removed"):
        load_config(TrainConfig, path, ["old=3"])


def test_a_removed_key_that_another_command_still_has_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(REMOVED_KEYS, "limit", "was removed")
    assert load_config(EvalConfig, None, ["limit=3"]).limit == 3


@pytest.mark.parametrize(
    ("cls", "override"),
    [
        (TrainConfig, "torch_compile=auto"),
        (EvalConfig, "compile=auto"),
        (EvalConfig, "gpu_kernels=[]"),
        (SelfDistillConfig, "compile=auto"),
    ],
)
def test_keys_of_earlier_versions_are_explained(cls: type[Config], override: str) -> None:
    required = REQUIRED if cls is TrainConfig else ()
    with pytest.raises(ConfigError) as caught:
        load_config(cls, None, [*required, override])
    name, _, value = override.partition("=")
    message = REMOVED_KEYS.get(name) or REMOVED_KEYS[f"{name}: {value}"]
    assert list(caught.value.problems) == [f"override '{override}': {name}: {message}"]


def test_a_configuration_does_not_change() -> None:
    cfg = load_config(TrainConfig, None, REQUIRED)
    with pytest.raises(ValidationError, match="frozen"):
        cfg.seed = 3
    with pytest.raises(ValidationError, match="frozen"):
        cfg.datasets[0].path = "x"
