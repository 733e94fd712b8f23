"""Configurations: what a key is worth in the end, and what is said of broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.behaviour.world import (
    FIXTURES,
    ROOT,
    Ran,
    command,
    evaluate,
    export,
    read_json,
    selfdistill,
    train,
)

MINIMAL = ["base_model=m", "datasets=[{path: a}]"]
#: Keys of commit 8d79f769 that a later version may leave out, with its reason in the changelog.
REMOVED: set[str] = {
    "gpu_kernels",
    "torch_compile",  # auto, the default, meant false
    "stage_one",  # it named a file; the values of the first stage are compared
}


def printed(*words: Any, name: str = "train") -> dict[str, Any]:
    """Return the values that `--print-config` prints."""
    text = command(name, *words, "--print-config").ok().out
    values: dict[str, Any] = yaml.safe_load(text)
    return values


def origins(*words: Any, name: str = "train") -> dict[str, str]:
    """Return where `--print-config` says that each value was set."""
    found = {}
    for line in command(name, *words, "--print-config").ok().out.splitlines():
        if not line.startswith("#"):
            found[line.partition(":")[0]] = line.rpartition("# ")[2]
    return found


def fails(*words: Any, name: str = "train") -> Ran:
    return command(name, *MINIMAL, *words) if name == "train" else command(name, *words)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# What is shipped


def test_shipped_configurations_mean_what_they_did() -> None:
    """Every key of every file, its stage one included, and the defaults of all commands."""
    stored = read_json(FIXTURES / "configurations.json")
    for name, values in stored.items():
        words = [ROOT / "configs" / name]
        if name.startswith("any_"):
            words.append("base_model=MODEL")
        text = train(*words, "--print-config").ok().out
        own, _, stage = text.partition("# stage one:")
        assert_same_values(yaml.safe_load(own), values["run"], name)
        first = "\n".join(line.removeprefix("# ") for line in stage.splitlines())
        assert_same_values(yaml.safe_load(first) or {}, values.get("stage_one", {}), name)
    shipped = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert set(stored) <= shipped


def assert_same_values(found: dict[str, Any], stored: dict[str, Any], name: str) -> None:
    for key, value in stored.items():
        if key not in REMOVED:
            now = found[key]
            if isinstance(value, dict):  # a section may have new keys
                now = {part: now[part] for part in value}
            assert now == value, f"{name}: {key}"


def test_defaults_of_all_commands() -> None:
    stored = read_json(FIXTURES / "defaults.json")
    for name, values in stored.items():
        words = MINIMAL if name == "train" else []
        if name == "export":
            continue  # it has no --print-config
        assert_same_values(printed(*words, name=name), values, name)


def test_the_schema_describes_every_key() -> None:
    schema = json.loads(train("--schema").ok().out)
    assert schema["$schema"].startswith("http://json-schema.org/")
    values = printed(*MINIMAL)
    assert set(values) <= set(schema["properties"])
    assert set(schema["required"]) == {"base_model", "datasets"}
    heads = schema["properties"]["medusa_num_heads"]
    assert heads["default"] == 5
    assert {"type": "integer", "minimum": 1, "maximum": 32} in heads["anyOf"]
    assert "K: number of heads" in heads["description"]
    assert json.loads((ROOT / "configs" / "schema.json").read_text()) == schema


# Where a value comes from


def test_options_win_over_overrides_and_these_over_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.yaml",
        "base_model: m\ndatasets:\n  - path: a\n  - path: b\nseed: 1\noutput_dir: one\n",
    )
    words = [path, "seed=2", "output_dir=two", "datasets.1.path=c", "hydra.num_layers=2"]
    words += ["draft=hydra", "datasets[0].type=messages", "--output-dir", "three"]
    values = printed(*words)
    assert (values["seed"], values["output_dir"]) == (2, "three")
    assert [entry["path"] for entry in values["datasets"]] == ["a", "c"]
    assert values["datasets"][0]["type"] == "messages"
    assert values["hydra"]["num_layers"] == 2
    assert values["hydra"]["num_heads"] == 4
    found = origins(*words)
    assert found["seed"] == "override 'seed=2'"
    assert found["output_dir"] == "--output-dir"
    assert found["base_model"].endswith("x.yaml:1")
    assert found["max_grad_norm"] == "default"
    assert found["recipe"] == "derived"


def test_of_several_the_last_one_counts_and_the_others_are_named() -> None:
    shown = train(
        *MINIMAL, "seed=1", "seed=2", "--output-dir", "a", "output_dir=b", "--print-config"
    )
    assert yaml.safe_load(shown.ok().out)["seed"] == 2
    shown.says("ignored keys", "seed=1", "output_dir=b")
    twice = evaluate("--limit", 1, "--limit", 2, "--print-config").ok()
    assert yaml.safe_load(twice.out)["limit"] == 2
    twice.says("--limit is given 2 times")
    below = train(
        *MINIMAL, "hydra.num_heads=3", "hydra={num_heads: 2}", "draft=hydra", "--print-config"
    )
    assert yaml.safe_load(below.ok().out)["hydra"]["num_heads"] == 2
    below.says("hydra.num_heads=3")


def test_values_of_overrides_are_yaml(tmp_path: Path) -> None:
    words = ["learning_rate=1e-3", "val_set_size=0.1", "sample_packing=true", "warmup_steps="]
    words += ["chat_template_kwargs.enable_thinking=false", "lora_target_modules=[q_proj, k_proj]"]
    words += ["special_tokens={eos_token: x}", "save_steps=0.5", "resume_from_checkpoint=true"]
    values = printed(*MINIMAL, *words)
    expected = {
        "learning_rate": 0.001,
        "val_set_size": 0.1,
        "sample_packing": True,
        "warmup_steps": None,
        "chat_template_kwargs": {"enable_thinking": False},
        "lora_target_modules": ["q_proj", "k_proj"],
        "special_tokens": {"eos_token": "x"},
        "save_steps": 0.5,
    }
    assert {key: values[key] for key in expected} == expected
    empty = write(tmp_path / "x.yaml", "base_model: m\ndatasets: [{path: a, type: }]\nseed:\n")
    assert printed(empty)["seed"] == 42
    assert printed(empty, "chat_template_kwargs={x: null}")["chat_template_kwargs"] == {"x": None}


def test_environment_variables_in_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/scratch")
    monkeypatch.setenv("NOTHING", "")
    values = printed(*MINIMAL, "output_dir=$PLACE/run", "datasets.0.path=${PLACE}/a.jsonl")
    assert values["output_dir"] == "/scratch/run"
    assert values["datasets"][0]["path"] == "/scratch/a.jsonl"
    for value in ("$MISSING/x", "${NOTHING}/x", "${PLACE:-x}", "$(x)"):
        fails(f"output_dir={value}").fails(2, "output_dir")


def test_files_are_found_from_the_working_directory_and_from_the_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert printed("configs/tiny_m1.yaml")["output_dir"] == "runs/tiny_m1"
    (tmp_path / "configs").mkdir()
    write(tmp_path / "configs" / "tiny_m1.yaml", "base_model: m\ndatasets: [{path: a}]\nseed: 9\n")
    assert printed("configs/tiny_m1.yaml")["seed"] == 9
    train("configs/tiny_m3.yaml").fails(2, "configs/tiny_m3.yaml", "tiny_m1.yaml")
    train("configs").fails(2, "configs", "directory")
    train("configs/tiny_m1.yaml", "configs/tiny_m2.yaml").fails(2, "one configuration file")


def test_what_follows_from_other_keys() -> None:
    cases: list[tuple[list[str], dict[str, Any]]] = [
        ([], {"recipe": "medusa1", "medusa_only_heads": True, "medusa_lr_multiplier": 4}),
        (["adapter=lora"], {"recipe": "medusa2", "medusa_only_heads": False}),
        (["medusa_num_unfreeze_layers=2"], {"recipe": "medusa2"}),
        (["medusa_only_heads=false"], {"recipe": "medusa2"}),
        (["recipe=medusa1", "adapter=lora"], {"recipe": "medusa1"}),
        (["draft=eagle3"], {"medusa_lr_multiplier": 1}),
        (["datasets.0.conversation=zephyr"], {"chat_template": "zephyr"}),
        (["chat_template=zephyr"], {"chat_template": "zephyr"}),
    ]
    for words, expected in cases:
        values = printed(*MINIMAL, *words)
        assert {key: values[key] for key in expected} == expected, words


def test_keys_without_an_effect_are_listed() -> None:
    shown = train(*MINIMAL, "recipe=medusa1", "adapter=lora", "lora_r=8", "--print-config").ok()
    shown.says("ignored keys (no effect): adapter, lora_r")
    assert origins(*MINIMAL, "lr_scheduler=constant", "warmup_steps=3")["warmup_steps"].endswith(
        "no effect"
    )
    for words, name in (
        (["lr_scheduler=linear", "cosine_min_lr_ratio=0.1"], "cosine_min_lr_ratio"),
        (["val_set_size=0", "eval_steps=5"], "eval_steps"),
        (["wandb_name=x"], "wandb_name"),
        (["train_on_inputs=true", "roles_to_train=[user]"], "roles_to_train"),
        (["draft=hydra", "medusa_num_heads=3"], "medusa_num_heads"),
        (["adapter=lora", "medusa_num_unfreeze_layers=1"], "medusa_num_unfreeze_layers"),
    ):
        train(*MINIMAL, *words, "--print-config").ok().says("ignored keys", name)
    for words, name in (
        (["top_p=0.9"], "top_p"),
        (["delta=0.2"], "delta"),
        (["concurrency=[2]"], "concurrency"),
        (["batch_size=2", "assistant_model=x"], "assistant_model"),
    ):
        evaluate(*words, "--print-config").ok().says("ignored keys", name)


def test_files_of_axolotl_are_read_and_their_other_keys_listed(tmp_path: Path) -> None:
    path = write(
        tmp_path / "axolotl.yaml",
        """base_model: m
base_model_config: m
model_type: LlamaForCausalLM
tokenizer_type: LlamaTokenizer
is_llama_derived_model: true
strict: false
datasets:
  - path: a.jsonl
    type: chat_template
    field_messages: chat
    message_property_mappings: {role: speaker, content: text}
    roles: {user: [customer], assistant: agent}
lora_r: 4
lora_fan_in_fan_out:
sequence_len: 256
pad_to_sequence_len: true
group_by_length: false
xformers_attention:
local_rank:
fsdp:
medusa_num_heads: 2
medusa_scheduler: sine
""",
    )
    shown = train(path, "--print-config").ok()
    values = yaml.safe_load(shown.out)
    assert (values["medusa_num_heads"], values["sequence_len"]) == (2, 256)
    assert values["datasets"][0]["type"] == "auto"
    assert values["datasets"][0]["roles"] == {"user": ["customer"], "assistant": ["agent"]}
    shown.says("ignored keys (no effect):", "model_type", "pad_to_sequence_len", "group_by_length")


# Broken ones

BROKEN = """base_model: m
datasets:
  - pth: a
    type: sharegtp
medusa_num_head: 3
seed: many
learning_rate: 0
warmup_steps: 4
warmup_ratio: 0.1
bf16: true
fp16: true
lr_scheduler: cosin
sample_packing: yes please
hydra: {num_head: 2}
flags: {x:1}
seed: 3
"""


def test_all_problems_at_once_with_line_value_and_nearest_key(tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml", BROKEN)
    shown = train(path, "gradient_acumulation_steps=2").fails(2)
    expected = [
        ("x.yaml:3", "datasets[0].path", "missing"),
        ("x.yaml:3", "datasets[0].pth", "path"),
        ("x.yaml:4", "datasets[0].type", "'sharegtp'", "sharegpt"),
        ("x.yaml:5", "medusa_num_head", "medusa_num_heads"),
        ("x.yaml:7", "learning_rate", "more than 0", "0"),
        ("x.yaml:8", "warmup_steps: 4", "warmup_ratio", "x.yaml:9"),
        ("x.yaml:10", "bf16: true", "fp16", "x.yaml:11"),
        ("x.yaml:12", "lr_scheduler", "cosine", "'cosin'"),
        ("x.yaml:13", "sample_packing", "'yes please'"),
        ("x.yaml:14", "hydra.num_head", "num_heads"),
        ("x.yaml:15", "flags"),
        ("x.yaml:16", "seed", "twice", "6"),
        ("override 'gradient_acumulation_steps=2'", "gradient_accumulation_steps"),
    ]
    lines = shown.err.splitlines()
    for words in expected:
        assert any(all(word in line for word in words) for line in lines), words
    places = [
        int(line.split("x.yaml:")[1].split(":")[0])
        for line in lines
        if "x.yaml:" in line.partition(": ")[0]
    ]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("medusa_num_heads: 0", ["medusa_num_heads", "1 or more", "0"]),
        ("medusa_num_heads: 2.5", ["medusa_num_heads", "integer", "2.5"]),
        ("val_set_size: 1.5", ["val_set_size", "less than 1", "1.5"]),
        ("medusa_decay_coefficient: 2", ["medusa_decay_coefficient", "1 or less"]),
        ("roles_to_train: []", ["roles_to_train", "1 or more"]),
        ("roles_to_train: assistant", ["roles_to_train", "list", "'assistant'"]),
        ("roles_to_train: [critic]", ["roles_to_train[0]", "'critic'"]),
        ("trust_remote_code: 1", ["trust_remote_code", "true or false"]),
        ("output_dir: false", ["output_dir", "text", "false"]),
        ("output_dir: ' '", ["output_dir", "empty"]),
        ("medusa_scheduler: sine_2", ["medusa_scheduler", "sine_2"]),
        ("lr: 1", ["lr", "learning_rate"]),
        ("heads: 1", ["heads", "medusa_num_heads"]),
        ("gibberish_xyz: 1", ["gibberish_xyz", "docs/reference/configuration.md"]),
        ("hydra: 3", ["hydra", "key: value"]),
        ("chat_template_kwargs: {messages: []}", ["chat_template_kwargs", "messages"]),
        ("reasoning_tags: [<r>]", ["reasoning_tags", "two"]),
        ("learning_rate: .inf", ["learning_rate", "number"]),
        ("seed: 99999999999999999999", ["seed", "64 bits"]),
        ("datasets: []", ["datasets"]),
        ("datasets:\n  - path: a\n    roles: {bot: [x]}", ["roles", "bot"]),
        ("datasets:\n  - path: a\n    conversation: chatlm", ["conversation", "chatml"]),
        ("export: [vlm]", ["export", "vllm"]),
    ],
)
def test_a_bad_value_names_its_line_and_what_is_allowed(
    line: str, words: list[str], tmp_path: Path
) -> None:
    head = "base_model: m\n" + ("" if line.startswith("datasets") else "datasets: [{path: a}]\n")
    path = write(tmp_path / "x.yaml", head + line + "\n")
    shown = train(path).fails(2, *words)
    assert "x.yaml:" in shown.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", ["x.yaml"]),
        ("a: b: c\n", ["x.yaml:1"]),
        ("\ta: 1\n", ["x.yaml:1"]),
        ("", ["x.yaml"]),
        ("base_model: [m\n", ["x.yaml"]),
    ],
)
def test_what_is_no_configuration(text: str, words: list[str], tmp_path: Path) -> None:
    train(write(tmp_path / "x.yaml", text)).fails(2, *words)


@pytest.mark.parametrize(
    "words",
    [
        ["load_in_4bit=true", "load_in_8bit=true"],
        ["adapter=qlora"],
        ["bf16=true", "fp16=true"],
        ["medusa_self_distillation=true"],
        ["medusa_distillation_regularization=0.5"],
        ["medusa_only_heads=true", "medusa_num_unfreeze_layers=1"],
        ["load_in_4bit=true", "medusa_num_unfreeze_layers=1"],
        ["recipe=medusa1", "medusa_only_heads=false"],
        ["recipe=medusa2", "load_in_8bit=true"],
        ["warmup_steps=0", "warmup_ratio=0.1"],
        ["save_steps=5", "saves_per_epoch=1"],
        ["eval_steps=0.5", "evals_per_epoch=1"],
        ["early_stopping_patience=2", "val_set_size=0"],
        ["test_datasets=[{path: a}]", "val_set_size=0.1"],
        ["resume_from_checkpoint=true", "overwrite_output_dir=true"],
        ["sequence_len=6", "medusa_num_heads=5"],
        ["medusa_share_lm_head=true", "adapter=lora"],
        ["medusa_share_lm_head=true", "medusa_num_layers=0"],
        ["medusa_vocab_size=1024", "export=[vllm, tgi]"],
        ["medusa_markov_rank=8", "export=[vllm]"],
        ["export=[merged]", "recipe=medusa1"],
        ["export=[reference-v2]", "medusa_share_lm_head=false"],
        ["export=[sglang]", "draft=medusa"],
        ["export=[vllm]", "draft=hydra"],
        ["draft=hydra", "adapter=lora"],
        ["draft=medusa", "hydra.num_layers=2"],
        ["draft=amphista", "amphista={alignment_weight: 0, label_weight: 0}"],
        ["draft=amphista", "amphista={auto_blocks: 0, position_encoding: false}"],
        ["draft=kangaroo", "kangaroo.attention=false"],
        ["cache_hidden_states=true", "adapter=lora", "dataset_prepared_path=x"],
        ["cache_hidden_states=true", "dataset_prepared_path="],
        ["torch_compile=true", "adapter=lora"],
        ["chat_template=zephyr", "datasets.0.conversation=chatml"],
    ],
    ids=" ".join,
)
def test_keys_that_do_not_go_together(words: list[str]) -> None:
    shown = fails(*words).fails(2)
    key = words[0].partition("=")[0].partition(".")[0]
    others = {word.partition("=")[0].partition(".")[0] for word in words}
    assert any(f"{name}" in shown.err for name in others), key
    assert shown.err.count("override '") >= 1


@pytest.mark.parametrize(
    "words",
    [
        ["bf16=auto", "fp16=true"],
        ["sequence_len=7", "medusa_num_heads=5"],
        ["resume_from_checkpoint=false", "overwrite_output_dir=true"],
        ["medusa_share_lm_head=true", "adapter=lora", "lora_target_modules=[q_proj]"],
        ["medusa_vocab_size=1024", "export=[merged, vllm]", "adapter=lora"],
        ["draft=eagle3", "export=[vllm, sglang, speculators]"],
    ],
    ids=" ".join,
)
def test_keys_that_do(words: list[str]) -> None:
    assert printed(*MINIMAL, *words)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["temperature=0.7"], "temperature"),
        (["acceptance=typical", "temperature=0"], "temperature"),
        (["acceptance=random"], "acceptance"),
        (["top_p=0"], "top_p"),
        (["rest.datastore=x"], "rest"),
        (["draft=rest"], "rest.datastore"),
        (["lookup.nodes=3"], "lookup"),
        (["lookahead.window=3"], "lookahead"),
        (["judge_model=x"], "judge_base_url"),
        (["judge_base_url=http://h/v1"], "judge_model"),
        (["server_url=http://h/v1", "special_tokens={eos_token: x}"], "special_tokens"),
        (["serve=true", "serve_args=['--speculative_config', x]"], "serve_args"),
        (["serve=true", "draft=lookahead"], "draft"),
        (["serve=true", "server_url=http://h/v1"], "server_url"),
        (["against=http://h/v1"], "server_url"),
        (["server_url=http://h/v1", "against=http://h/v1"], "against"),
        (["server_url=ftp://h"], "server_url"),
        (["server_url=http://h/v1", "acceptance=typical"], "acceptance"),
        (["server_url=http://h/v1", "chat_template=x.jinja"], "chat_template"),
        (["serve=true", "draft=medusa+rest", "rest.datastore=x"], "draft"),
        (["serve=true", "serve_args=[--port, '1']"], "--port"),
        (["serve=true", "serve_args=[--api-key=x]"], "serve_args"),
        (["serve=true", "serve_args=[--hf_token=x]"], "serve_args"),
        (["concurrency=[0]"], "concurrency"),
        (["bench=humaneval"], "allow_code_execution"),
    ],
    ids=str,
)
def test_evaluations_that_make_no_sense(words: list[str], key: str) -> None:
    evaluate(*words, "--print-config").fails(2, key)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--seed", "5"], "seed=N"),
        (["engine=openai", "base_model=m"], "server_url"),
        (["engine=local", "server_url=http://h/v1"], "server_url"),
        (["server_url=http://h/v1"], "base_model"),
        (["--prompts", "sharegpt"], "--model"),
        (["server_url=http://h/v1", "base_model=m", "mode=selftalk"], "selftalk"),
        (["server_url=http://h/v1", "base_model=m", "batch_size=3"], "concurrency"),
        (["server_url=http://h/v1", "base_model=m", "heads=runs/x"], "heads"),
        (["min_chars=9", "max_chars=3"], "max_chars"),
        (["temperature=-1"], "temperature"),
        (["top_p=0"], "top_p"),
        (["max_new_token=3"], "max_new_tokens"),
    ],
    ids=str,
)
def test_selfdistillation_that_makes_no_sense(words: list[str], key: str) -> None:
    selfdistill(*words).fails(2, key)


def test_prompts_of_a_single_length() -> None:
    words = ["base_model=m", "min_chars=9", "max_chars=9", "--print-config"]
    selfdistill(*words).ok().says("min_chars: 9")


def test_exports_that_make_no_sense() -> None:
    export("runs/x", "--to", "vlm").fails(2, "vllm")
    export("runs/x", "too=vllm").fails(2, "to")


def test_a_malformed_override_says_how_it_is_written() -> None:
    for word, words in (
        ("datasets.5.path=x", ["datasets[5]"]),
        ("seed.x=1", ["seed"]),
        ("a..b=1", ["key=value"]),
    ):
        fails(word).fails(2, *words)


# DeepSpeed's own file


def test_a_deepspeed_file_that_contradicts_the_configuration(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 9},
                "train_micro_batch_size_per_gpu": 7,
                "gradient_clipping": 3.0,
                "no_such_key": 1,
                "optimizer": {"type": "Adam", "params": {"lr": 5}},
            }
        )
    )
    words = [*MINIMAL, f"base_model={model}", f"deepspeed={path}", "micro_batch_size=2"]
    data = tmp_path / "a.jsonl"
    data.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    shown = train(*words, f"datasets.0.path={data}", f"output_dir={tmp_path / 'run'}")
    assert shown.code == 2, shown.text
    for word in ("train_micro_batch_size_per_gpu", "7", "2", "no_such_key", "stage"):
        assert word in shown.text
    path.write_text('{"zero_optimization": {"stage": 1}, "zero_optimization": {"stage": 2}}')
    assert train(*words, f"datasets.0.path={data}", f"output_dir={tmp_path / 'run'}").code == 2
    train(*words, "deepspeed=none.json").fails(2, "none.json")


# Options of modes


def test_options_that_a_mode_does_not_read_are_refused(tmp_path: Path) -> None:
    evaluate("--compare", "a", "b", "--dtype", "float32").fails(2, "--dtype")
    evaluate("--interactive", "--batch-size", "3").fails(2, "--batch-size")
    evaluate("--calibrate", "--compare").fails(2, "--compare")
    train(*MINIMAL, "--num-gpus", "0").fails(2, "--num-gpus")
    for name in ("train", "eval", "selfdistill", "export"):
        shown = command(name, "--version")
        assert shown.code == 0
        assert "medusa-train" in shown.out
        helped = command(name, "--help")
        assert helped.code == 0
        assert "Exit codes" in helped.out or name == "export"
