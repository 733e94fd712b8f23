"""Check a configuration before any weights are loaded. `check_files` checks its files before torch
is imported; `check_run` checks it against the config of the target model that transformers reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.resolve import find_initial_adapter, find_initial_heads
from medusa_train.checkpoint.run_directory import MODEL, check_inputs
from medusa_train.config.load import stage_one_config
from medusa_train.config.paths import resolve_path
from medusa_train.config.schema import TrainConfig
from medusa_train.data.builtin_templates import get_template
from medusa_train.data.read_chats import check_first_records
from medusa_train.errors import CheckpointError, ConfigError
from medusa_train.models.hf_config import check_exit_layer, quantization_of
from medusa_train.models.model_files import find_target_model, read_adapter_config
from medusa_train.training.deepspeed_config import check_deepspeed, stage_of


def check_files(cfg: TrainConfig, processes: int = 1, *, reads_data: bool = True) -> None:
    """Check the files of a run and its stage one without importing torch, which takes seconds. The
    data may be missing unless the run `reads_data`.

    Checks that need the target model's config are made only if its config.json is on this machine.

    Raises:
        MedusaError: a file is missing or cannot be read, or the configuration does not fit it.
    """
    if reads_data:
        check_inputs(cfg)
    stage_one = stage_one_config(cfg)
    stages = [cfg] if stage_one is None else [stage_one, cfg]
    for stage in stages:
        check_deepspeed(stage, processes)
        check_initial_weights(stage)
        _, config = find_target_model(stage.base_model)
        text_config = _mapping(config.get("text_config")) or config
        check_shape(stage, text_config, _mapping(config.get("quantization_config")))
        for name in (stage.chat_template, *(entry.conversation for entry in stage.all_datasets)):
            if name:
                get_template(name)
    if not reads_data:
        return
    check_first_records(cfg.all_datasets, skip_bad=cfg.skip_bad_records)
    if stage_one is not None:
        stage_one_data = [
            entry for entry in stage_one.all_datasets if entry not in cfg.all_datasets
        ]
        check_first_records(stage_one_data, skip_bad=stage_one.skip_bad_records)


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def check_run(cfg: TrainConfig, processes: int) -> None:
    """Check `cfg` against the target model's config and the number of `processes`."""
    from transformers.integrations import is_deepspeed_available

    from medusa_train.models.loading import resolve_target_model
    from medusa_train.training.deepspeed_strategy import check_zero

    _, config = resolve_target_model(cfg.base_model, trust_remote_code=cfg.trust_remote_code)
    # 1. Check the processes, and the weights to start from.
    deepspeed = check_deepspeed(cfg, processes)
    if cfg.deepspeed is not None and is_deepspeed_available():
        check_zero(deepspeed)
    check_8bit_states(cfg, stage_of(deepspeed), processes)
    check_initial_weights(cfg, config)
    # 2. Check the draft and the recipe on this target model.
    check_without_trees(cfg, config)
    check_shape(cfg, config.get_text_config().to_dict(), quantization_of(config))


def check_shape(
    cfg: TrainConfig, text_config: Mapping[str, Any], quantization: Mapping[str, Any] | None
) -> None:
    """Check the draft and the recipe against the target model's vocabulary, layers and
    quantization. Numbers that `text_config` does not have are not checked.
    """
    size = cfg.draft_config.settings.get("vocab_size")
    vocab_size = text_config.get("vocab_size")
    if size is not None and isinstance(vocab_size, int) and size >= vocab_size:
        raise ConfigError(
            f"{cfg.draft_config.vocab_size_key}: {size:,} must be less than the {vocab_size:,}"
            " tokens of the target model; leave it out to use all of them"
        )
    method = (quantization or {}).get("quant_method")
    can_be_merged = method is None or (method == "bitsandbytes" and cfg.adapter is not None)
    if cfg.recipe == "medusa2" and not can_be_merged:
        raise ConfigError(
            f"base_model: {cfg.base_model} is quantized ({method}), and joint training needs an"
            " adapter that can be merged: name the original model, with load_in_4bit: true and"
            " adapter: qlora where memory is short"
        )
    layers = text_config.get("num_hidden_layers")
    if not isinstance(layers, int):
        return
    if cfg.medusa_num_unfreeze_layers > layers:
        raise ConfigError(
            f"medusa_num_unfreeze_layers: {cfg.medusa_num_unfreeze_layers} exceeds the {layers}"
            f" layers of {cfg.base_model}; 0 trains the whole model"
        )
    for count in cfg.draft_config.aux_layers(layers):
        check_exit_layer(count, layers, cfg.base_model, cfg.draft_config.layers_key)


def check_without_trees(cfg: TrainConfig, model_config: Any) -> None:
    """Reject settings that need tree masks or single layers, if the target model can only run whole
    documents.
    """
    from medusa_train.models.architecture import describe_without_trees

    problem = describe_without_trees(model_config, cfg.base_model)
    if problem is None:
        return
    if cfg.sample_packing:
        raise ConfigError(f"sample_packing: true: {problem}. Set sample_packing: false")
    if cfg.recipe != "medusa1":
        raise ConfigError(f"recipe: {cfg.recipe}: {problem}. Set recipe: medusa1")
    if cfg.draft not in ("medusa", "eagle3"):
        raise ConfigError(f"draft: {cfg.draft}: {problem}. Set draft: medusa or eagle3")


def check_8bit_states(cfg: TrainConfig, stage: int, processes: int) -> None:
    """Reject an 8-bit optimizer if ZeRO would have to partition its states at this stage."""
    if "8bit" not in cfg.optimizer or stage == 0 or (processes == 1 and cfg.deepspeed is None):
        return
    default = " (the default of several processes)" if cfg.deepspeed is None else ""
    raise ConfigError(
        f"optimizer: {cfg.optimizer}: ZeRO stage {stage}{default} cannot partition 8-bit states."
        " Set optimizer: adamw_torch, whose float32 states take 8 bytes for each trained parameter,"
        " partitioned over the processes, or zero_optimization.stage: 0 in deepspeed, where every"
        " process has all 8-bit states, 2 bytes for each"
    )


def check_initial_weights(cfg: TrainConfig, config: Any | None = None) -> None:
    """Check, before anything is loaded, that this run can start from `lora_model_dir`.

    Args:
        config: transformers' config of the target model. Without it, the function does not check
            which layers an adapter leaves out, because that check needs torch.
    """
    if cfg.lora_model_dir is None:
        return
    # 1. Check that there are heads or an adapter.
    home = cfg.initial_run
    adapter = find_initial_adapter(home)
    if home is None or (adapter is None and find_initial_heads(home) is None):
        raise CheckpointError(
            f"lora_model_dir: {cfg.lora_model_dir} holds neither heads nor an adapter. Train stage"
            " one into it first (for example medusa-train configs/tiny_m1.yaml), or remove the key"
            " to start from untrained heads."
        )
    # 2. Check that jointly trained heads are used with the target model that they were trained
    # with.
    if adapter is not None:
        if cfg.recipe == "medusa1" or cfg.adapter is None:
            raise ConfigError(
                f"lora_model_dir: {cfg.lora_model_dir} was trained jointly: its heads belong to the"
                f" adapter in {adapter}, which this run would drop. Use recipe: medusa2 with an"
                " adapter, or a run that trained heads only"
            )
        _check_adapter(cfg, config, adapter)
    model = home / MODEL
    target_model = resolve_path(cfg.base_model)
    if model.is_dir() and (target_model is None or target_model.resolve() != model.resolve()):
        raise ConfigError(
            f"lora_model_dir: {cfg.lora_model_dir} was trained jointly: its heads belong to the"
            f" target model in {model}, not to {cfg.base_model}. Set base_model: {model}, or use a"
            " run that trained heads only"
        )


def check_same_settings(what: str, settings: Iterable[tuple[str, Any, Any]]) -> None:
    """Check that the weights a run starts from were trained with the run's settings.

    Args:
        what: describes the weights in the message.
        settings: triples of a key, the value it had in training, and the configured value.
    """
    differing = [setting for setting in settings if setting[1] != setting[2]]
    if differing:
        trained = ", ".join(f"{key}: {value}" for key, value, _ in differing)
        configured = ", ".join(f"{key}: {value}" for key, _, value in differing)
        raise ConfigError(f"lora_model_dir: {what} {trained}, the configuration {configured}")


def adapter_settings(directory: Path) -> dict[str, Any]:
    """Return the settings of the adapter in `directory`, under the names of our keys."""
    saved = read_adapter_config(directory)
    if saved["peft_type"] != "LORA":
        raise ConfigError(
            f"lora_model_dir: the adapter in {directory} is of the type {saved['peft_type']}; only"
            " LoRA adapters are trained"
        )
    targets = saved.get("target_modules") or ()
    if isinstance(targets, str):
        targets = [targets]
    return {
        "lora_r": saved.get("r"),
        "lora_alpha": saved.get("lora_alpha"),
        "lora_dropout": saved.get("lora_dropout"),
        "lora_target_modules": sorted(targets),
        "lora_modules_to_save": sorted(saved.get("modules_to_save") or ()),
    }


def _check_adapter(cfg: TrainConfig, config: Any | None, directory: Path) -> None:
    """Compare the configuration's adapter settings with those of the adapter to start from."""
    # 1. Compare the adapter's settings with the keys that the user set.
    settings = []
    for key, value in adapter_settings(directory).items():
        configured = getattr(cfg, key)
        if isinstance(configured, list):
            configured = sorted(configured)
        is_overridden = key == "lora_target_modules" and cfg.lora_target_linear
        if key in cfg.model_fields_set and configured is not None and not is_overridden:
            settings.append((key, value, configured))
    check_same_settings(f"the adapter in {directory} has", settings)
    # 2. If all linear layers are to be trained, check that the adapter has them all.
    if cfg.lora_target_linear and config is not None:
        from medusa_train.models.loading import model_without_weights
        from medusa_train.models.lora import layers_left_out

        model = model_without_weights(config, trust_remote_code=cfg.trust_remote_code)
        left_out = layers_left_out(model, directory)
        if left_out:
            raise ConfigError(
                f"lora_model_dir: the adapter in {directory} does not train every linear layer, as"
                f" lora_target_linear: true asks; it leaves out {', '.join(left_out)}. Remove"
                " lora_target_linear to train the layers that it has"
            )
