"""The keys themselves: defaults, combinations, shipped files."""

import re
from pathlib import Path

import pytest

from medusa_train.config.keys import Config
from medusa_train.config.load import dump_config, load_config
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import EvalConfig, ExportConfig, SelfDistillConfig, TrainConfig
from medusa_train.errors import ConfigError

MINIMAL = ["base_model=m", "datasets=[{path: a}]"]


def train(*overrides: str) -> TrainConfig:
    return load_config(TrainConfig, None, [*MINIMAL, *overrides])


@pytest.mark.parametrize("cls", [EvalConfig, SelfDistillConfig, ExportConfig])
def test_commands_work_without_any_key_and_defaults_are_valid(
    cls: type[Config], tmp_path: Path
) -> None:
    assert all(
        info.description and "\n" not in info.description for info in cls.model_fields.values()
    )
    path = tmp_path / "x.yaml"
    path.write_text(dump_config(cls()))
    assert load_config(cls, path).model_dump() == load_config(cls, None).model_dump()
    run = tmp_path / "config.yaml"
    run.write_text(dump_config(train("recipe=medusa1")))
    assert load_config(TrainConfig, run).ignored == ()  # of a run, whose keys nobody set
    assert "lora_r" not in run.read_text()


def test_silent_yamls_get_the_papers_settings() -> None:
    cfg = train()
    assert (cfg.medusa_num_heads, cfg.medusa_num_layers, cfg.medusa_decay_coefficient) == (
        5,
        1,
        0.8,
    )
    assert (cfg.medusa_heads_coefficient, cfg.medusa_lr_multiplier, cfg.medusa_scheduler) == (
        0.2,
        4,
        "constant",
    )
    assert cfg.heads_learning_rate == pytest.approx(2e-3)
    assert (cfg.lora_r, cfg.lora_alpha, cfg.lora_dropout) == (32, 16, 0.05)


@pytest.mark.parametrize("kind", ["hydra", "amphista", "kangaroo"])
def test_other_drafts_learn_at_the_learning_rate(kind: str) -> None:
    """A factor of four is Medusa's recipe."""
    assert train(f"draft={kind}", "learning_rate=3e-5").heads_learning_rate == 3e-5
    assert (
        train(f"draft={kind}", "learning_rate=3e-5", "medusa_lr_multiplier=2").heads_learning_rate
        == 6e-5
    )
    # medusa_num_heads has no say in it
    assert train(f"draft={kind}", "sequence_len=5").sequence_len == 5


@pytest.mark.parametrize(
    ("overrides", "recipe"),
    [
        ([], "medusa1"),
        (["recipe=medusa2"], "medusa2"),
        (["medusa_only_heads=true"], "medusa1"),
        (["medusa_only_heads=false"], "medusa2"),
        (["adapter=lora"], "medusa2"),
        (["adapter=lora", "medusa_only_heads=true"], "medusa1"),
        (["adapter=lora", "recipe=medusa1"], "medusa1"),
        (["medusa_num_unfreeze_layers=2"], "medusa2"),
        (["load_in_4bit=true"], "medusa1"),
    ],
)
def test_the_recipe_follows_from_the_keys(overrides: list[str], recipe: str) -> None:
    cfg = train(*overrides)
    assert (cfg.recipe, cfg.medusa_only_heads) == (recipe, recipe == "medusa1")


LORA = ["adapter=lora", "lora_r=32", "lora_alpha=8", "lora_dropout=0", "lora_target_linear=true"]


@pytest.mark.parametrize(
    ("overrides", "ignored"),
    [
        ([], ""),
        (["recipe=medusa1", *LORA], "adapter lora_alpha lora_dropout lora_r lora_target_linear"),
        (["recipe=medusa1", "lora_target_modules=[q]", "lora_modules_to_save=[v]"],
         "lora_modules_to_save lora_target_modules"),
        (["recipe=medusa1", "adapter=lora", "medusa_self_distillation=true", "medusa_heads_coefficient=0",
          "medusa_distillation_regularization=0.5", "medusa_scheduler=sine", "gradient_checkpointing=true"],
         "adapter gradient_checkpointing medusa_distillation_regularization medusa_heads_coefficient "
         "medusa_scheduler medusa_self_distillation"),
        (["recipe=medusa1", "gradient_checkpointing=false", "medusa_self_distillation=false"], ""),
        (["recipe=medusa1", "medusa_lr_multiplier=2", "lora_model_dir=runs/x", "medusa_soft_targets=0.5"], ""),
        (["recipe=medusa2", *LORA, "medusa_self_distillation=true", "gradient_checkpointing=true"], ""),
        (["recipe=medusa2", *LORA, "lora_target_modules=[q]"], "lora_target_modules"),
        (["recipe=medusa2", "adapter=lora", "medusa_num_unfreeze_layers=1"], "medusa_num_unfreeze_layers"),
        (["recipe=medusa2", "lora_r=8", "medusa_num_unfreeze_layers=1"], "lora_r"),
        (["adapter=lora", "medusa_self_distillation=true", "medusa_distillation_regularization=0.5"],
         "medusa_distillation_regularization"),
        (["lr_scheduler=constant", "warmup_ratio=0.1"], "warmup_ratio"),
        (["lr_scheduler=constant", "warmup_steps=0"], ""),
        (["val_set_size=0", "eval_steps=5"], "eval_steps"),
        (["val_set_size=0", "eval_steps=5", "test_datasets=[{path: a}]"], ""),
        (["wandb_entity=me", "wandb_run_id=7"], "wandb_entity wandb_run_id"),
        (["wandb_entity=me", "wandb_run_id=7", "wandb_project=p"], ""),
    ],
)  # fmt: skip
def test_keys_that_were_set_without_effect_are_listed(overrides: list[str], ignored: str) -> None:
    assert train(*overrides).ignored == tuple(ignored.split())


def test_the_chat_template_is_that_of_all_datasets() -> None:
    def template(*overrides: str) -> str | None:
        return load_config(TrainConfig, None, ["base_model=m", *overrides]).chat_template

    vicuna, zephyr = "{path: a, conversation: vicuna_v1.1}", "{path: b, conversation: zephyr}"
    assert template(f"datasets=[{vicuna}, {vicuna}]") == "vicuna_v1.1"
    with pytest.raises(ConfigError, match="no data set has this template"):
        template(f"datasets=[{vicuna}]", "chat_template=zephyr")
    assert template(f"datasets=[{vicuna}, {zephyr}]") is None
    assert template(f"datasets=[{vicuna}, {{path: c}}]") is None
    assert "chat_template: zephyr" in dump_config(
        TrainConfig(base_model="m", datasets=[{"path": "b", "conversation": "zephyr"}])
    )


def test_template_variables_and_reasoning_tags(tmp_path: Path) -> None:
    cfg = train("chat_template_kwargs.enable_thinking=false", "reasoning_tags=[<r>, </r>]")
    assert (cfg.chat_template_kwargs, cfg.reasoning_tags) == (
        {"enable_thinking": False},
        ("<r>", "</r>"),
    )
    (tmp_path / "config.yaml").write_text(dump_config(cfg))
    again = load_config(TrainConfig, tmp_path / "config.yaml")
    assert (again.chat_template_kwargs, again.reasoning_tags) == (
        cfg.chat_template_kwargs,
        cfg.reasoning_tags,
    )
    assert train().reasoning_tags == ("<think>", "</think>")
    for override, words in [
        (
            "chat_template_kwargs=no_think",
            "expected a mapping such as {name: value}, got 'no_think'",
        ),
        (
            "chat_template_kwargs={messages: [], tools: []}",
            "messages, tools: set for each chat by its record; remove it",
        ),
        ("reasoning_tags=<r>", "expected two tags such as [<think>, </think>], got '<r>'"),
        ("reasoning_tags=[<r>]", "expected two tags"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(words)):
            train(override)


SHARED_Q = ["medusa_share_lm_head=true", "adapter=lora", "lora_target_modules=[q_proj]"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["load_in_4bit=true", "load_in_8bit=true"], "load_in_4bit: true: cannot be set together"),
        (["adapter=qlora"], "set load_in_4bit: true"),
        (["bf16=true", "fp16=true"], "bf16: true: cannot be set together with fp16"),
        (
            ["medusa_self_distillation=true"],
            "medusa_self_distillation: true: the teacher is the target model with its adapter disabled",
        ),
        (
            ["medusa_distillation_regularization=0.5"],
            "the teacher is the target model with its adapter disabled",
        ),
        (
            ["medusa_only_heads=true", "medusa_num_unfreeze_layers=1"],
            "medusa_num_unfreeze_layers must be 0",
        ),
        (
            ["recipe=medusa1", "medusa_num_unfreeze_layers=1"],
            "medusa_num_unfreeze_layers must be 0",
        ),
        (
            ["load_in_4bit=true", "medusa_num_unfreeze_layers=1"],
            "quantized layers cannot be trained",
        ),
        (["recipe=medusa1", "medusa_only_heads=false"], "remove one of the two keys"),
        (["recipe=medusa2", "load_in_8bit=true"], "only with an adapter"),
        (
            ["warmup_steps=0", "warmup_ratio=0.1"],
            "warmup_steps: 0: cannot be set together with warmup_ratio",
        ),
        (["save_steps=5", "saves_per_epoch=1"], "save_steps: 5: cannot be set together"),
        (["eval_steps=0.5", "evals_per_epoch=1"], "eval_steps: 0.5: cannot be set together"),
        (["early_stopping_patience=2", "val_set_size=0"], "requires evaluations"),
        (
            ["test_datasets=[{path: a}]", "val_set_size=0.1"],
            "test_datasets are the data for evaluation",
        ),
        (["resume_from_checkpoint=true", "overwrite_output_dir=true"], "choose one"),
        (["sequence_len=6", "medusa_num_heads=5"], "sequence_len: 6: too short"),
        (["medusa_share_lm_head=true", "adapter=lora"], "keep it frozen"),
        ([*SHARED_Q, "lora_target_modules=[q_proj, lm_head]"], "keep it frozen"),
        ([*SHARED_Q, "lora_modules_to_save=[lm_head]"], "keep it frozen"),
        (["medusa_share_lm_head=true", "recipe=medusa2"], "keep it frozen"),
        (["medusa_share_lm_head=true", "medusa_num_layers=0"], "no parameters to train"),
        (
            ["medusa_vocab_size=1024", "export=[vllm, tgi]"],
            "only the vllm and transformers layouts support",
        ),
        (
            ["medusa_markov_rank=8", "export=[vllm]"],
            "no other program reads heads with a Markov bias",
        ),
        (
            ["medusa_markov_rank=8", "export=[merged, transformers]", "adapter=lora"],
            "no other program reads",
        ),
    ],
)
def test_impossible_combinations(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train(*overrides)
    (problem,) = caught.value.problems
    assert words in problem
    assert problem.startswith("override '")


def test_a_bench_of_programming_problems_needs_permission_to_run_code() -> None:
    with pytest.raises(ConfigError, match="allow_code_execution=true"):
        load_config(EvalConfig, None, ["bench=humaneval"])
    assert load_config(
        EvalConfig, None, ["bench=humaneval", "allow_code_execution=true"]
    ).allow_code_execution
    assert not load_config(EvalConfig, None, ["bench=humaneval", "score=false"]).score


@pytest.mark.parametrize(
    "overrides",
    [
        ["bf16=auto", "fp16=true"],
        ["sequence_len=7", "medusa_num_heads=5"],
        ["resume_from_checkpoint=false", "overwrite_output_dir=true"],
        SHARED_Q,
        ["medusa_vocab_size=1024", "export=[merged, vllm]", "adapter=lora"],
        ["medusa_markov_rank=8", "export=merged", "adapter=lora"],
    ],
)
def test_possible_combinations(overrides: list[str]) -> None:
    train(*overrides)


SHIPPED = sorted((PROJECT_ROOT / "configs").glob("*.yaml"))
FOR_ANY_MODEL = ("any_eagle3", "any_m1")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_configuration_is_valid_and_names_its_run(path: Path) -> None:
    overrides = ["base_model=MODEL"] if path.stem in FOR_ANY_MODEL else []
    cfg = load_config(TrainConfig, path, overrides)
    assert cfg.ignored == ()
    assert cfg.output_dir == f"runs/{path.stem}"
    assert (cfg.recipe == "medusa2") == ("_m2" in path.stem)


@pytest.mark.parametrize(
    ("name", "cls"), [("selfdistill", SelfDistillConfig), ("evaluate", EvalConfig)]
)
def test_the_examples_of_the_other_commands_are_valid(name: str, cls: type[Config]) -> None:
    """Their values are the defaults, but for those that an example has to choose."""
    overrides = {"selfdistill": ["base_model=MODEL"], "evaluate": []}[name]
    cfg = load_config(cls, PROJECT_ROOT / f"configs/examples/{name}.yaml", overrides)
    assert cfg.ignored == ()
    chosen = {
        key
        for key in cfg.model_fields_set - {"engine"}  # follows from server_url
        if getattr(cfg, key) != type(cfg).model_fields[key].default
    }
    expected = {
        "selfdistill": {"base_model", "seed_dataset", "sample", "output"},
        "evaluate": {"bench", "limit", "max_new_tokens", "compile"},
    }
    assert chosen == expected[name]


@pytest.mark.parametrize("name", FOR_ANY_MODEL)
def test_a_configuration_for_any_model_asks_for_the_model(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, PROJECT_ROOT / f"configs/{name}.yaml")
    assert (
        "base_model: is missing (the target model: a Hugging Face model directory or a hub name); set"
        " it in the file, or add base_model=... to the command"
    ) in str(caught.value)


def test_the_vicuna_configurations_hold_the_papers_numbers() -> None:
    for name in ("vicuna7b_m1", "vicuna7b_m2"):
        cfg = load_config(TrainConfig, PROJECT_ROOT / f"configs/{name}.yaml")
        assert cfg.micro_batch_size * cfg.gradient_accumulation_steps == 64
        assert (cfg.num_epochs, cfg.sequence_len, cfg.warmup_steps, cfg.weight_decay) == (
            2,
            4096,
            40,
            0,
        )
        assert (cfg.learning_rate, cfg.heads_learning_rate) == pytest.approx((5e-4, 2e-3))
    assert (cfg.adapter, cfg.lora_r, cfg.lora_alpha) == ("qlora", 32, 16)


@pytest.mark.parametrize(
    "name", ["vicuna7b_m2", "vicuna13b_m2", "vicuna33b_m2", "zephyr7b_m2", "llama31_8b_m2"]
)
def test_lambda0_belongs_to_the_loss(name: str) -> None:
    """With the KL the paper's 0.01, converted to means over two thirds of the tokens, rises along a
    sine.
    """
    cfg = load_config(TrainConfig, PROJECT_ROOT / f"configs/{name}.yaml")
    assert (cfg.medusa_self_distillation, cfg.medusa_scheduler) == (True, "sine")
    assert cfg.medusa_heads_coefficient == pytest.approx(0.01 * 3 / 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["temperature=0.7"],
            "greedy decoding has no temperature; set acceptance: sampling or typical",
        ),
        (["acceptance=typical", "temperature=0"], "at temperature 0 this is greedy decoding"),
        (["acceptance=sampling", "temperature=0"], "at temperature 0 this is greedy decoding"),
        (["acceptance=random"], "must be greedy, sampling or typical"),
        (["top_p=0"], "must be more than 0"),
    ],
)
def test_modes_of_evaluation_that_make_no_sense(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(EvalConfig, None, overrides)


def test_a_server_is_not_asked_for_the_test_model() -> None:
    with pytest.raises(ConfigError, match="requests need a model name"):
        load_config(SelfDistillConfig, None, ["server_url=http://localhost:8000/v1"])


def test_keys_of_another_mode_of_evaluation_are_listed_as_ignored() -> None:
    assert load_config(EvalConfig, None, ["top_p=0.9", "temperature=0"]).ignored == ("top_p",)
    typical = load_config(
        EvalConfig, None, ["acceptance=typical", "top_k=5", "delta=0.2", "exactness=false"]
    )
    assert typical.ignored == ("exactness", "top_k")
    assert typical.temperature == 0.7
    batch = load_config(EvalConfig, None, ["batch_size=2", "compile=true", "assistant_model=a"])
    assert batch.ignored == ("assistant_model",)
