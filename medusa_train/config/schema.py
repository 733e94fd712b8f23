"""Define the keys of every command: type, default, limits and description.

Names are those of Axolotl and of its Medusa fork (`medusa_*`), so that their YAML files work.
Defaults are the Medusa paper's settings. An empty key (null) means the default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, model_validator

from medusa_train.config import rules
from medusa_train.config.draft_sections import (
    DRAFT_CONFIGS,
    LOOKUPS,
    SECTIONS,
    AmphistaConfig,
    DFlashConfig,
    DraftConfig,
    Eagle3Config,
    HydraConfig,
    KangarooConfig,
    LookaheadConfig,
    LookupChoice,
    LookupConfig,
    LookupName,
    MedusaConfig,
    RestConfig,
    TrainedDraft,
    flat,
)
from medusa_train.config.keys import (
    ADAPTER,
    DATA,
    HEADS,
    JOINT,
    LOCAL,
    SERVE,
    SERVER,
    THIS_RUN,
    WEIGHTS,
    Config,
    Section,
    key,
    keys_marked,
)
from medusa_train.config.paths import expand_user, resolve_path
from medusa_train.config.types import (
    STAGE_ONE,
    Address,
    Bool,
    BoolOrAuto,
    ChatTemplateName,
    ExportTarget,
    Fraction,
    Int,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    OneOrMore,
    PlainText,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    PropertyMappings,
    Quantization,
    ReasoningTags,
    Resume,
    RoleNames,
    Schedule,
    Share,
    SpecialTokens,
    TemplateKwargs,
    Text,
    TextOrMapping,
    VariableName,
    VocabSize,
    problem,
)

#: Axolotl keys without a meaning here: accepted with any value, and listed as ignored. For example,
#: classes follow from the target model's files, and batches are padded to their longest row.
IGNORED_AXOLOTL_KEYS = frozenset(
    [
        "is_llama_derived_model",
        "is_mistral_derived_model",
        "is_falcon_derived_model",
        "xformers_attention",
        "sdp_attention",
        "strict",
        "debug",
        "local_rank",
        "fsdp",
        "fsdp_config",
        "group_by_length",
        "lora_fan_in_fan_out",
        "wandb_watch",
        "wandb_log_model",
        "ddp_find_unused_parameters",
        "push_dataset_to_hub",
        "hub_model_id",
        "torchdistx_path",
        "gptq",
        "tokens",
        "eval_table_size",
        "shuffle_merged_datasets",
        "model_type",
        "tokenizer_type",
        "base_model_config",
        "pad_to_sequence_len",
        "eval_sample_packing",
        "eval_max_new_tokens",
        "plugins",
        "liger_rope",
        "liger_rms_norm",
        "liger_glu_activation",
        "liger_fused_linear_cross_entropy",
        "s2_attention",
        "flash_attn_cross_entropy",
        "lora_mlp_kernel",
        "lora_qkv_kernel",
        "lora_o_kernel",
        "gradient_checkpointing_kwargs",
        "save_safetensors",
        "eval_table_max_new_tokens",
        "use_reentrant",
        "loss_watchdog_threshold",
        "loss_watchdog_patience",
    ]
)

Optimizer = Literal[
    "adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"
]


#: Keys of a data set that describe its turns.
_TURN_KEYS = (
    "field_messages",
    "message_property_mappings",
    "message_field_role",
    "message_field_content",
    "message_field_training",
    "roles",
)


def _record_format(value: object) -> object:
    return "auto" if value == "chat_template" else value


#: What to write in place of `stage_one: FILE` and of its key `config`, which earlier versions had.
_SECOND_FILE = (
    "a second file is no longer read; write the keys in which stage one differs from the run, for"
    " example `stage_one: {learning_rate: 1e-3, num_epochs: 1}`"
)


def _stage_one(value: object) -> object:
    if isinstance(value, str):
        raise problem(_SECOND_FILE)
    return value


StageOne = Annotated[dict[str, Any], BeforeValidator(_stage_one)]


class DatasetConfig(Section):
    """One entry of `datasets`."""

    text_key = "path"
    axolotl_hints: ClassVar = {
        "train_on_eos": "the end of every answer is trained; remove it",
        "train_on_eot": "the end of every answer is trained; remove it",
        "roles_to_train": "applies to all datasets: set it next to `datasets`",
        "chat_template": (
            "is called `conversation` here; for all datasets, set it next to `datasets`"
        ),
    }

    path: Text = key(
        ...,
        "file (JSONL or JSON, also gzipped, or Parquet), directory of files, name of a dataset on"
        " the hub, or sharegpt, ultrachat or tiny",
    )
    type: Annotated[
        Literal["auto", "sharegpt", "messages", "alpaca"], BeforeValidator(_record_format)
    ] = key(
        "auto", "format of the records; auto, and Axolotl's chat_template: detected from their keys"
    )
    field_messages: Text | None = key(
        None, "column that holds the turns; default: messages or conversations, whichever is there"
    )
    message_property_mappings: PropertyMappings | None = key(
        None, "keys of a turn, if others than usual: {role: speaker, content: text}"
    )
    message_field_role: Text | None = key(None, "key of a turn's role; default: role or from")
    message_field_content: Text | None = key(
        None, "key of a turn's content; default: content or value"
    )
    message_field_training: Text | None = key(
        None, "key of a turn that says whether it is trained; default: train or training"
    )
    roles: RoleNames | None = key(
        None, "names of roles in the data, in addition to the usual ones: {user: [customer]}"
    )
    conversation: ChatTemplateName = key(
        None, "chat template of this dataset (vicuna_v1.1, zephyr, ...), or a .jinja file"
    )
    split: Text | None = key(
        None, "split of a hub dataset, or of a directory with files for each; default: train"
    )
    name: Text | None = key(
        None, "configuration name of a hub dataset, or subdirectory of a directory"
    )
    data_files: OneOrMore[PlainText] | None = key(
        None,
        "files to read, with path: json or parquet (also patterns); or files of the directory or"
        " hub dataset in `path`",
        min_length=1,
    )
    ds_type: Literal["json", "parquet"] | None = key(
        None, "format of the files, checked; default: follows from their names"
    )

    @model_validator(mode="after")
    def _check_fields(self) -> DatasetConfig:
        """Reject two names for the same part of a turn, and keys of turns for alpaca, which has
        none.
        """
        for part in self.message_property_mappings or {}:
            if getattr(self, f"message_field_{part}") is not None:
                raise problem(
                    f"message_field_{part} and message_property_mappings both name the {part}"
                )
        if self.type == "alpaca" and self.model_fields_set.intersection(_TURN_KEYS):
            raise problem(f"alpaca has no turns: remove {', '.join(_TURN_KEYS)}")
        return self

    @property
    def role_key(self) -> str | None:
        """Key of a turn's role; None if the configuration does not set it."""
        return self.message_field_role or (self.message_property_mappings or {}).get("role")

    @property
    def content_key(self) -> str | None:
        """Key of a turn's content; None if the configuration does not set it."""
        return self.message_field_content or (self.message_property_mappings or {}).get("content")


#: Pairs of keys of which only one is used. One on the command line replaces the other in a file.
_ALTERNATIVES = (
    *rules.EXCLUSIVE,
    ("test_datasets", "val_set_size"),
    ("stage_one", "lora_model_dir"),
)


class TrainConfig(Config):
    """Keys of `medusa-train`."""

    replaces = (
        *_ALTERNATIVES,
        *((other, name) for name, other in _ALTERNATIVES),
        ("num_epochs", "max_steps"),
        ("recipe", "medusa_only_heads"),
    )

    axolotl_hints: ClassVar = {
        "attn_implementation": (
            "is chosen by `flash_attention`; leave it out for the fastest that there is"
        ),
        "batch_size": "is micro_batch_size x gradient_accumulation_steps; set these",
        "config": _SECOND_FILE,
        "eval_batch_size": "is micro_batch_size; remove it",
        "train_on_eos": "the end of every answer is trained; remove it",
        "wandb_mode": "set the environment variable WANDB_MODE",
    }
    options: ClassVar = {
        "overwrite_output_dir": "--overwrite",
        "resume_from_checkpoint": "--resume",
    }
    ignored_axolotl_keys = IGNORED_AXOLOTL_KEYS

    # Target model
    base_model: Text = key(
        ..., "the target model: a Hugging Face model directory or a hub name", DATA
    )
    trust_remote_code: Bool = key(
        False, "allow Python code from the target model's repository", DATA
    )
    load_in_4bit: Bool = key(
        False, "quantize the target model to 4-bit NF4 (bitsandbytes)", WEIGHTS
    )
    load_in_8bit: Bool = key(False, "quantize the target model to 8 bits (bitsandbytes)", WEIGHTS)

    # Draft heads
    recipe: Literal["medusa1", "medusa2"] | None = key(
        None,
        "medusa1: frozen target model; medusa2: joint training; default: medusa2 if adapter or"
        " another key implies it",
        WEIGHTS,
    )
    draft: TrainedDraft = key(
        "medusa", "kind of draft to train; all but medusa require a frozen target model", HEADS
    )
    hydra: HydraConfig | None = key(None, "settings of draft: hydra", HEADS)
    amphista: AmphistaConfig | None = key(None, "settings of draft: amphista", HEADS)
    kangaroo: KangarooConfig | None = key(None, "settings of draft: kangaroo", HEADS)
    eagle3: Eagle3Config | None = key(None, "settings of draft: eagle3", HEADS)
    dflash: DFlashConfig | None = key(None, "settings of draft: dflash", HEADS)
    medusa_num_heads: PositiveInt = flat("num_heads")
    medusa_num_layers: NonNegativeInt = flat("num_layers")
    medusa_decay_coefficient: PositiveShare = flat("decay_coefficient")
    medusa_heads_coefficient: NonNegativeFloat = key(
        0.2, "lambda0: weight of the heads' loss (medusa2 only)", JOINT
    )
    medusa_scheduler: Schedule = key(
        "constant",
        "schedule of lambda0 (medusa2 only): constant, linear, sine, or sine_R (sine over the"
        " fraction R of the run)",
        JOINT,
    )
    medusa_only_heads: Bool | None = key(
        None, "true: recipe medusa1, false: medusa2; default: follows from recipe"
    )
    medusa_lr_multiplier: PositiveFloat | None = key(
        None,
        "learning rate of the draft relative to learning_rate; default: 4 for medusa, else 1",
    )
    medusa_self_distillation: Bool = key(
        False,
        "LM loss is the KL from the target model without adapter (medusa2 only)",
        JOINT,
    )
    medusa_distillation_regularization: Share = key(
        0.0,
        "rho: weight of the teacher's distribution in the LM target (medusa2 only)",
        JOINT,
    )
    medusa_soft_targets: Share = flat("soft_targets")
    medusa_num_unfreeze_layers: NonNegativeInt = key(
        0,
        "N: train the last N layers, final norm and lm_head; 0: all (medusa2 without an adapter)",
        WEIGHTS,
    )
    medusa_logging: Bool = key(False, "log the top-k accuracy of each head during training")
    medusa_share_lm_head: Bool = flat("share_lm_head")
    medusa_vocab_size: VocabSize | None = flat("vocab_size")
    medusa_markov_rank: NonNegativeInt = flat("markov_rank")
    calibration_tokens: NonNegativeInt = key(
        6000, "tokens to generate on held-out prompts to fit tree.json; 0: no tree"
    )

    # Adapter
    adapter: Literal["lora", "qlora"] | None = key(
        None, "train the target model through a LoRA adapter (medusa2 only)", WEIGHTS, JOINT
    )
    lora_r: PositiveInt = key(32, "rank of the adapter", WEIGHTS, ADAPTER)
    lora_alpha: PositiveInt = key(
        16, "scaling of the adapter: lora_alpha / lora_r", WEIGHTS, ADAPTER
    )
    lora_dropout: Fraction = key(0.05, "dropout on the adapter's input", ADAPTER)
    lora_target_modules: OneOrMore[PlainText] | None = key(
        None, "linear layers to adapt; default: all", WEIGHTS, ADAPTER
    )
    lora_target_linear: Bool = key(False, "adapt every linear layer", WEIGHTS, ADAPTER)
    lora_modules_to_save: OneOrMore[PlainText] | None = key(
        None, "modules to train in full in addition to the adapter", WEIGHTS, ADAPTER
    )
    lora_model_dir: Text | None = key(
        None,
        "finished run to initialize heads and adapter from (two-stage training); replaces"
        " stage_one",
        THIS_RUN,
    )
    stage_one: StageOne | None = key(
        None,
        "two-stage training in one run: the heads are trained first, in output_dir/stage_one, by"
        " this configuration with recipe: medusa1, without the keys of the adapter and of joint"
        " training, and with the keys that are set here: {learning_rate: 1e-3, num_epochs: 1}",
        THIS_RUN,
    )

    # Data
    datasets: OneOrMore[DatasetConfig] = key(..., "training data", DATA, min_length=1)
    dataset_prepared_path: Text | None = key(None, "directory to cache tokenized data in")
    cache_hidden_states: Bool = key(
        False,
        "store the frozen target model's hidden states under dataset_prepared_path; later epochs"
        " and runs read them instead of running the target model",
    )
    dataset_processes: PositiveInt | None = key(
        None,
        "maximum number of processes that tokenize; default: the CPU cores, 16 at most; small"
        " data: 1",
    )
    sequence_len: Int = key(
        2048,
        "maximum length in tokens; longer conversations are cut at the end of a turn",
        DATA,
        ge=4,
    )
    sample_packing: Bool = key(
        False, "pack several conversations into one row of sequence_len tokens", DATA
    )
    chat_template: ChatTemplateName = key(
        None,
        "name of the chat template, or a .jinja file; "
        "default: the datasets' `conversation` if all are equal, else the tokenizer's",
        DATA,
    )
    chat_template_kwargs: TemplateKwargs | None = key(
        None, "variables of the template: {enable_thinking: false}", DATA
    )
    special_tokens: SpecialTokens | None = key(
        None,
        "tokens of the vocabulary to use as eos_token, bos_token, unk_token or pad_token, as in"
        " Axolotl: {eos_token: <|im_end|>}; answers end at the eos_token, too",
        DATA,
    )
    reasoning_tags: ReasoningTags = key(
        ("<think>", "</think>"),
        "tags around the reasoning part of an answer; join `reasoning_content` and `content`",
        DATA,
    )
    max_rows_per_chat: PositiveInt = key(
        8,
        "maximum number of rows of a chat with tool calls, if its template changes earlier turns:"
        " the last ones, and some of the others",
        DATA,
    )
    roles_to_train: list[Literal["assistant", "user", "system"]] = key(
        ["assistant"], "roles whose turns are training targets", DATA, min_length=1
    )
    train_on_inputs: Bool = key(False, "train on all tokens, including prompts", DATA)
    val_set_size: Fraction = key(
        0.05, "share of the conversations to hold out, if test_datasets is not set", DATA
    )
    test_datasets: OneOrMore[DatasetConfig] | None = key(
        None,
        "data for evaluation and to fit the tree, of which nothing is trained on; default: held out"
        " by val_set_size",
        DATA,
        min_length=1,
    )
    skip_bad_records: Bool = key(
        False,
        "skip invalid records of your own files, too, instead of failing; those of `sharegpt`,"
        " `ultrachat` and the hub are skipped",
        DATA,
    )

    # Optimization
    micro_batch_size: PositiveInt = key(
        1, "conversations per forward pass (rows if sample_packing)"
    )
    gradient_accumulation_steps: PositiveInt = key(1, "forward passes per optimizer step")
    num_epochs: PositiveFloat = key(2, "number of epochs")
    max_steps: PositiveInt | None = key(
        None, "maximum number of optimizer steps; overrides num_epochs"
    )
    optimizer: Optimizer = key(
        "adamw_torch",
        "8-bit ones need bitsandbytes, and ZeRO stage 0 in several processes",
        WEIGHTS,
    )
    adam_beta1: Fraction = key(0.9, "decay of AdamW's mean of gradients")
    adam_beta2: Fraction = key(
        0.999,
        "decay of AdamW's mean of squared gradients; EAGLE-3 and Kangaroo at 7B and 8B: 0.95",
    )
    adam_epsilon: PositiveFloat = key(1e-8, "AdamW's term against division by zero")
    lr_scheduler: Literal["cosine", "linear", "constant", "constant_with_warmup"] = key(
        "cosine", "learning rate schedule; constant has no warm-up"
    )
    cosine_min_lr_ratio: Fraction = key(0.0, "final learning rate of cosine, relative to the peak")
    learning_rate: PositiveFloat = key(
        5e-4, "peak of the target model; the draft's is multiplied by medusa_lr_multiplier"
    )
    warmup_steps: NonNegativeInt | None = key(None, "linear warm-up in optimizer steps")
    warmup_ratio: Fraction | None = key(None, "linear warm-up as a fraction of the run")
    weight_decay: NonNegativeFloat = key(0.0, "weight decay, applied to matrices only")
    max_grad_norm: NonNegativeFloat = key(1.0, "maximum gradient norm for clipping; 0: no clipping")
    max_nonfinite_steps: NonNegativeInt = key(
        0, "maximum number of NaN/Inf steps to skip before aborting"
    )
    seed: NonNegativeInt = key(42, "random seed", DATA)

    # Precision and memory
    bf16: BoolOrAuto = key(
        "auto",
        "compute in bfloat16; auto: if the device multiplies it faster than float32",
    )
    fp16: Bool = key(False, "compute in float16 with loss scaling (GPU only; float32 on a CPU)")
    tf32: Bool = key(False, "allow TF32 in float32 matrix products")
    gradient_checkpointing: BoolOrAuto = key(
        False,
        "recompute activations to save memory (medusa2 only); auto: if the estimate without it"
        " takes more than 90 % of the GPU's memory",
    )
    flash_attention: BoolOrAuto = key(
        "auto",
        "use flash-attn's varlen kernel on packed rows, else one call of torch's attention for each"
        " conversation; auto: if it is installed and supported",
    )
    torch_compile: Bool = key(
        False,
        "run the frozen target model's layers compiled by torch.compile (medusa1 only); the first"
        " steps take longer. Not benchmarked on a GPU yet",
    )
    deepspeed: TextOrMapping | None = key(
        None, "a JSON file (configs/deepspeed/zero2.json), or a mapping"
    )

    # Run
    output_dir: Text = key("runs/medusa", "output directory of the run")
    overwrite_output_dir: Bool = key(
        False, "delete an earlier run in output_dir and start over", THIS_RUN
    )
    resume_from_checkpoint: Resume = key(
        None,
        "true or auto: resume from the newest checkpoint; or the path of one",
        THIS_RUN,
    )
    logging_steps: PositiveInt = key(10, "log metrics every N optimizer steps")
    eval_steps: Interval | None = key(
        None, "evaluate every N optimizer steps (below 1: fraction of the run)"
    )
    evals_per_epoch: PositiveInt | None = key(
        None, "evaluations per epoch; default: 1 if eval_steps is not set"
    )
    save_steps: Interval | None = key(
        None, "save a checkpoint every N optimizer steps (below 1: fraction of the run)"
    )
    saves_per_epoch: PositiveInt | None = key(
        None, "checkpoints per epoch; default: 1 if save_steps is not set"
    )
    save_total_limit: PositiveInt = key(
        2,
        "number of newest checkpoints to keep, in addition to the weights of the best one",
    )
    early_stopping_patience: PositiveInt | None = key(
        None,
        "stop after this many evaluations without improvement, and use the weights of the best one",
    )
    export: OneOrMore[ExportTarget] | None = key(
        None, "layouts to export to output_dir/export after training", THIS_RUN
    )
    use_tensorboard: Bool = key(False, "write TensorBoard event files to output_dir/tensorboard")
    wandb_project: Text | None = key(None, "Weights & Biases project to log to")
    wandb_entity: Text | None = key(None, "Weights & Biases entity (team or user)")
    wandb_name: Text | None = key(
        None, "Weights & Biases name of the run; default: its directory's", THIS_RUN
    )
    wandb_run_id: Text | None = key(None, "Weights & Biases run to resume", THIS_RUN)

    violations: ClassVar = rules.train_violations
    ineffective_keys: ClassVar = rules.ineffective_train_keys

    @property
    def trains_stage_one(self) -> bool:
        """Whether stage one trains heads first; `lora_model_dir` is a run that already trained
        them.
        """
        return self.stage_one is not None and self.lora_model_dir is None

    @property
    def mixes_rows(self) -> bool:
        """Whether several conversations share a forward pass."""
        return self.sample_packing or self.micro_batch_size > 1

    @property
    def run_dir(self) -> Path:
        """The directory `output_dir`."""
        return expand_user(self.output_dir)

    @property
    def prepared_dir(self) -> Path | None:
        """`dataset_prepared_path` with `~` expanded."""
        if self.dataset_prepared_path is None:
            return None
        return expand_user(self.dataset_prepared_path)

    @property
    def quantization(self) -> Quantization | None:
        """The type to which the target model's weights are quantized; None if they are not."""
        if self.load_in_4bit:
            return "nf4"
        if self.load_in_8bit:
            return "int8"
        return None

    @property
    def initial_run(self) -> Path | None:
        """The run whose heads, and adapter if it has one, this run starts from; None if there is
        none.
        """
        name = self.lora_model_dir
        if self.trains_stage_one:
            name = stage_one_values(self.output_dir)["output_dir"]
        if name is None:
            return None
        return resolve_path(name)

    @property
    def heads_keys(self) -> dict[str, Any]:
        """The keys that heads depend on, with their values: target model, kind and shape."""
        section = self.draft_config
        settings = {f"{section.prefix}{name}": value for name, value in section.settings.items()}
        return {"base_model": self.base_model, "draft": self.draft, **settings}

    @property
    def all_datasets(self) -> list[DatasetConfig]:
        """`datasets` and `test_datasets`."""
        return [*self.datasets, *(self.test_datasets or ())]

    @property
    def draft_config(self) -> DraftConfig:
        """The section of the selected `draft`, with defaults filled in; for Medusa, collected from
        the flat keys.
        """
        if self.draft in SECTIONS:
            return getattr(self, self.draft) or SECTIONS[self.draft]()
        flat = {
            name: getattr(self, f"{MedusaConfig.prefix}{name}")
            for name in MedusaConfig.model_fields
        }
        return MedusaConfig(**flat)

    def describe_loss(self) -> str:
        """Describe the loss in one phrase: the loss of the heads, or of joint training."""
        heads = self.draft_config.heads_loss.describe()
        if self.recipe != "medusa2":
            return heads
        if self.medusa_self_distillation:
            model = "KL divergence to the target model without its adapter"
        else:
            model = "cross-entropy of the target model against the tokens of the data"
            rho = self.medusa_distillation_regularization
            if rho:
                model += f", {rho:.0%} of the target from the target model without its adapter"
        schedule, _, share = self.medusa_scheduler.partition("_")
        coefficient = f"{self.medusa_heads_coefficient:g}"
        if schedule == "constant":
            lambda0 = f"lambda0 = {coefficient}"
        else:
            rises = {"linear": "rises linearly", "sine": "rises along a sine"}[schedule]
            if share:
                rises += f" over {float(share):.0%} of the run"
            lambda0 = f"lambda0, which {rises} to {coefficient},"
        return f"{model}; plus {lambda0} times the heads' {heads}"

    @property
    def heads_learning_rate(self) -> float:
        """Peak learning rate of the draft: `learning_rate` x `medusa_lr_multiplier`."""
        return self.learning_rate * self._lr_multiplier

    @property
    def _lr_multiplier(self) -> float:
        return self.medusa_lr_multiplier or DRAFT_CONFIGS[self.draft].lr_multiplier

    def derived(self) -> dict[str, Any]:
        """Return the values that follow from other keys.

        `recipe` and `medusa_only_heads` follow from each other or from the keys of joint training.
        `chat_template` follows from the datasets if all have the same `conversation`, so that
        decoding uses the template of training. The section of `draft` gets its defaults.
        """
        recipe = self.recipe or ("medusa2" if rules.implies_joint_training(self) else "medusa1")
        derived: dict[str, Any] = {
            "recipe": recipe,
            "medusa_lr_multiplier": self._lr_multiplier,
        }
        if self.medusa_only_heads is None:
            derived["medusa_only_heads"] = recipe == "medusa1"
        templates = {dataset.conversation for dataset in self.datasets}
        if self.chat_template is None and len(templates) == 1:
            derived["chat_template"] = templates.pop()
        if self.test_datasets is not None and "val_set_size" not in self.model_fields_set:
            derived["val_set_size"] = 0.0  # its default would be a second set in config.yaml
        if self.draft in SECTIONS:
            derived[self.draft] = self.draft_config
        return derived


def stage_one_values(output_dir: str) -> dict[str, Any]:
    """Return the keys that stage one of a run always has: recipe, directory, and no calibrated
    tree.
    """
    directory = str(Path(output_dir) / STAGE_ONE)
    return {"recipe": "medusa1", "output_dir": directory, "calibration_tokens": 0}


#: Keys that decide which examples there are: stages with equal values share the data.
DATA_KEYS = keys_marked(TrainConfig, DATA)
#: Keys on which trained weights and the optimizer depend, in addition to base_model and the heads'
#: own.
WEIGHT_KEYS = keys_marked(TrainConfig, WEIGHTS)
#: Keys that stage one does not inherit: those of the run alone, and those of joint training.
NOT_INHERITED = (
    *keys_marked(TrainConfig, THIS_RUN, JOINT, ADAPTER),
    *("recipe", "medusa_only_heads", "medusa_num_unfreeze_layers"),
)
#: Keys that `stage_one` cannot set: both stages hold out the same conversations, and train heads of
#: one kind.
NOT_IN_STAGE_ONE = (
    *keys_marked(TrainConfig, THIS_RUN, HEADS),
    *("base_model", "output_dir", "seed", "val_set_size", "test_datasets"),
)


class DecodingKeys(Config):
    """Keys of the commands that decode: how prompts are written and answers sampled."""

    trust_remote_code: Bool = key(False, "allow Python code from the target model's repository")
    chat_template: ChatTemplateName = key(
        None,
        "name of the chat template, or a .jinja file; default: the run's, else the tokenizer's",
    )
    chat_template_kwargs: TemplateKwargs | None = key(
        None,
        "variables of the template, such as {enable_thinking: false}, which a server gets as they"
        " are; default: the run's",
    )
    special_tokens: SpecialTokens | None = key(
        None,
        "tokens of the vocabulary to use as eos_token and so on; default: the run's, else the"
        " tokenizer's",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto",
        "data type; auto: bfloat16 where the device is fast in it, else float16 on a GPU and"
        " float32 on a CPU",
    )
    top_p: PositiveShare = key(1.0, "sample from the fewest tokens with this total probability")
    top_k: PositiveInt | None = key(None, "sample from the k most probable tokens; default: all")
    request_timeout: PositiveFloat = key(
        600.0, "timeout of a request to a server in seconds", SERVER
    )


class EvalConfig(DecodingKeys):
    """Keys of `medusa-eval`."""

    bench: Text = key(
        "tiny",
        "benchmark: tiny, tools, mtbench, specbench, humaneval, gsm8k, or a question file or its"
        " directory",
    )
    model: Text | None = key(
        None, "run directory or directory of heads; default: the newest run in runs/"
    )
    base_model: Text | None = key(
        None,
        "target model; default: the one that the run or the heads were trained with; with"
        " server_url: the model's name on the server, default: the only one that it lists",
    )
    tree: Text | None = key(
        None,
        "fixed: the run's tree.json (the default); dynamic: another tree in every step, as large"
        " and deep (EAGLE-3), or dynamic:32x5 with 32 nodes, 5 deep, with the fixed one measured"
        " as well; none: plain decoding, with the heads' guesses recorded; or a tree file",
        LOCAL,
    )
    draft: LookupName | None = key(
        None,
        "draft without training: prompt_lookup copies from the text so far, rest copies from a"
        " datastore, lookahead takes n-grams that the target model guesses ahead; with a prefix"
        " (medusa+...): added to the tree of the run's heads; default: the run's heads alone",
    )
    lookup: LookupConfig | None = key(None, "settings of prompt_lookup")
    lookahead: LookaheadConfig | None = key(None, "settings of lookahead", LOCAL)
    rest: RestConfig | None = key(
        None, "settings of rest; required by it, for the datastore", LOCAL
    )
    threshold: Share | None = key(
        None,
        "Kangaroo: drafting stops after a token whose probability is at most this; 0: never; if"
        " set, no CUDA graphs; default: the run's, 0 with CUDA graphs",
        LOCAL,
    )
    max_new_tokens: PositiveInt = key(256, "maximum length of an answer in tokens")
    compile: Bool = key(
        False,
        "compile decoding with torch.compile: faster steps, one to several minutes of additional"
        " start-up time. By default also if the run's tree was fitted to compiled steps",
        LOCAL,
    )
    acceptance: Literal["greedy", "sampling", "typical"] = key(
        "greedy",
        "greedy: plain decoding's tokens; sampling: samples of the model's distribution (lossless);"
        " typical: any plausible draft token, which changes the distribution",
    )
    temperature: NonNegativeFloat | None = key(
        None, "temperature of sampling and typical acceptance; default: 0.7"
    )
    epsilon: PositiveFloat = key(
        0.09, "typical acceptance: probability above which a token is always accepted"
    )
    delta: PositiveFloat = key(
        0.3, "typical acceptance: factor of exp(-entropy), the threshold at uncertain positions"
    )
    batch_size: PositiveInt = key(1, "number of questions to answer in the same passes", LOCAL)
    limit: PositiveInt | None = key(None, "use only N questions, taken from all categories in turn")
    turns_per_chat: PositiveInt = key(
        4, "of a chat with tools, ask for the first N recorded answers, each after what precedes it"
    )
    output_dir: Text | None = key(
        None,
        "directory of the report; default: eval/BENCH in the run directory, eval/served-BENCH for a"
        " server",
    )
    warmup: NonNegativeInt = key(
        2, "questions answered untimed first; for a server at least as many as run concurrently"
    )
    exactness: Bool = key(
        True,
        "also compare greedy answers with plain decoding's in float32 and bfloat16, not only in the"
        " measured dtype",
        LOCAL,
    )
    equality: Literal["auto", "all"] = key(
        "auto",
        "answers to compare; auto: all within a minute, else a random sample in half the time of"
        " the measurement, at least 8",
        LOCAL,
    )
    generate: Bool = key(True, "also measure transformers' generate", LOCAL)
    prompt_lookup: Bool = key(True, "also measure transformers' prompt lookup decoding", LOCAL)
    assistant_model: Text | None = key(
        None,
        "small model with the same tokenizer; also measure transformers' assisted generation"
        " with it",
        LOCAL,
    )
    judge_base_url: Address | None = key(
        None, "URL of an OpenAI-compatible server that grades with judge_model", LOCAL
    )
    judge_model: Text | None = key(
        None, "name of the judge model; default: answers are not judged", LOCAL
    )
    judge_concurrency: PositiveInt = key(4, "number of concurrent judge requests", LOCAL)
    score: Bool = key(
        True,
        "score answers to gsm8k (exact match) and humaneval (pass@1); false: only decode",
        LOCAL,
    )
    allow_code_execution: Bool = key(
        False,
        "allow running the code that the model writes, in isolated processes; required to score"
        " humaneval (pass@1)",
        LOCAL,
    )
    rouge: Bool = key(
        False,
        "score answers by ROUGE-1/2/L where the question file has a `reference` (rouge-score)",
        LOCAL,
    )
    calibration_tokens: Int = key(
        12000, "number of tokens to generate on held-out prompts for --calibrate", LOCAL, ge=100
    )
    seed: NonNegativeInt = key(42, "random seed")

    # Servers
    server_url: Address | None = key(
        None, "OpenAI-compatible server to measure, http://HOST:PORT/v1"
    )
    against: Address | None = key(
        None, "server of the same model without heads; it and server_url are measured in turns"
    )
    serve: Bool = key(
        False,
        "start and stop vLLM servers for the model, without heads and with them (or with draft:"
        " prompt_lookup, vLLM's ngram), and measure them; environment variable VLLM_PYTHON: the"
        " interpreter that has vLLM, if not this one",
    )
    serve_speculative_tokens: OneOrMore[PositiveInt] | None = key(
        None,
        "values of num_speculative_tokens to measure; default: 1 to the number of heads, 1 to 5"
        " (EAGLE-3), or 2, 4, 8 (prompt_lookup)",
        SERVE,
        min_length=1,
    )
    serve_together: BoolOrAuto = key(
        "auto",
        "keep the server without heads running next to the one with heads, and measure them in"
        " turns; false: one server at a time, the one without heads first and last; auto: true"
        " without a GPU",
        SERVE,
    )
    serve_args: OneOrMore[PlainText] | None = key(
        None, 'more arguments of vLLM, such as ["--max-model-len", "4096"]', SERVE, min_length=1
    )
    serve_start_seconds: PositiveFloat = key(
        900.0, "timeout in seconds for a server of `serve` to become ready", SERVE
    )
    concurrency: OneOrMore[PositiveInt] = key(
        [1, 2, 4, 8, 16, 32], "numbers of concurrent conversations to measure", SERVER, min_length=1
    )
    retry_seconds: NonNegativeFloat = key(
        120.0, "failed requests are retried for up to this many seconds", SERVER
    )
    api_key_env: VariableName = key(
        "OPENAI_API_KEY",
        "environment variable that holds the API key of running servers and of the judge; the"
        " servers of `serve` have VLLM_API_KEY",
    )

    violations: ClassVar = rules.eval_violations
    ineffective_keys: ClassVar = rules.ineffective_eval_keys

    @property
    def lookup_choice(self) -> LookupChoice | None:
        """The draft without training; None: the run's heads alone."""
        if self.draft is None:
            return None
        return LookupChoice.from_keys(
            self.draft, getattr(self, LOOKUPS[self.draft.rpartition("+")[2]][1])
        )

    @property
    def uses_server(self) -> bool:
        """Whether the benchmark is measured through a server."""
        return bool(self.serve or self.server_url is not None)

    def derived(self) -> dict[str, Any]:
        """Return the default temperature of sampling and typical acceptance."""
        if self.acceptance == "greedy" or self.temperature is not None:
            return {}
        return {"temperature": 0.7}


class SelfDistillConfig(DecodingKeys):
    """Keys of `medusa-selfdistill`."""

    options: ClassVar = {
        "base_model": "--model",
        "seed_dataset": "--prompts --seed",
    }

    # Prompts
    seed_dataset: Text = key(
        "tiny",
        "prompts: tiny, sharegpt, ultrachat, a file or directory of conversations, or the name of a"
        " hub dataset; --seed is an old name of this option, the random seed is seed=N",
    )
    type: Literal["auto", "sharegpt", "messages", "alpaca"] = key(
        "auto", "record format; auto: by its keys"
    )
    split: Text | None = key(None, "split of a hub dataset; default: train")
    name: Text | None = key(
        None, "configuration name of a hub dataset, or subdirectory of a directory"
    )
    skip_bad_records: Bool = key(
        False,
        "skip invalid records of your own files, too, instead of failing; those of `sharegpt`,"
        " `ultrachat` and the hub are skipped",
    )
    max_turns: PositiveInt | None = key(
        None, "use only the first N user turns of each conversation"
    )
    turns_per_chat: PositiveInt = key(
        4,
        "answers of a chat with tools to generate, spread over it: each after the recorded messages"
        " before it, and in a conversation of its own",
    )
    min_chars: PositiveInt | None = key(
        None, "minimum length of a conversation's user turns in characters"
    )
    max_chars: PositiveInt | None = key(
        None, "maximum length of a conversation's user turns in characters"
    )
    sample: PositiveInt | None = key(
        None, "number of conversations to sample at random; default: all"
    )
    sample_seed: NonNegativeInt = key(42, "random seed of sample")
    limit: PositiveInt | None = key(None, "use only the first N prompts")

    # Conversations
    mode: Literal["replay", "selftalk"] = key(
        "replay",
        "replay: answer the user's turns; selftalk: continue from the first one, with the model in"
        " both roles",
    )
    rounds: PositiveInt = key(5, "maximum number of answers per conversation in selftalk")
    temperature: NonNegativeFloat = key(0.3, "sampling temperature; 0: greedy")
    max_new_tokens: PositiveInt = key(2048, "maximum length of an answer in tokens")
    drop_truncated: Bool = key(
        True, "drop answers that reached max_new_tokens, and the turns after them"
    )
    drop_looping: Bool = key(
        True,
        "drop answers that repeat eight words (in code: lines) three times, and the turns after"
        " them",
    )
    seed: NonNegativeInt = key(42, "random seed of sampling")

    # Model or server
    engine: Literal["local", "openai"] | None = key(
        None,
        "local: run the model in this process; openai: use an OpenAI-compatible server; default: by"
        " server_url",
    )
    base_model: Text | None = key(
        None,
        "model: a Hugging Face directory, a hub name or a run; on a server, its name there;"
        " default, for the prompts `tiny` only: data/tiny, an 11M test model; name yours",
    )
    reasoning_tags: ReasoningTags = key(
        ("<think>", "</think>"),
        "tags around the reasoning part of an answer; join `reasoning_content` and `content`",
    )
    batch_size: PositiveInt | None = key(
        None, "rows of a batch (engine: local); default: 16, 1 in float32 or with heads"
    )
    compile: Bool = key(
        False,
        "compile decoding with torch.compile (engine: local): faster steps, one to several minutes"
        " of additional start-up time",
    )
    heads: Text | None = key(
        None, "run or directory of heads to decode with; its target model is the default model"
    )
    server_url: OneOrMore[Address] | None = key(
        None,
        "URL of the server, http://HOST:PORT/v1, or a list of servers with the same model",
        min_length=1,
    )
    concurrency: PositiveInt = key(
        64, "maximum number of concurrent requests to each server", le=1024
    )
    retry_seconds: NonNegativeFloat = key(
        900.0, "failed requests are retried for up to this many seconds"
    )
    api_key_env: VariableName = key("OPENAI_API_KEY", "environment variable that holds the API key")
    output: Text | None = key(
        None, "JSONL file to write; default: runs/selfdistill/SEED_DATASET.jsonl"
    )

    violations: ClassVar = rules.selfdistill_violations

    def derived(self) -> dict[str, Any]:
        """Return `engine` (openai if `server_url` is set). For the prompts `tiny`, also return the
        test model as `base_model`.
        """
        engine = self.engine or ("openai" if self.server_url else "local")
        derived: dict[str, Any] = {"engine": engine}
        names_model = self.base_model is not None or self.heads is not None
        if engine == "local" and not names_model and self.seed_dataset == "tiny":
            derived["base_model"] = "data/tiny"
        return derived


class ExportConfig(Config):
    """Keys of `medusa-export`."""

    run: Text | None = key(
        None, "run directory or directory of heads; default: the newest run in runs/"
    )
    to: ExportTarget = key(
        "reference",
        "layout to write; merged: the jointly trained target model with its adapter merged",
    )
    output_dir: Text | None = key(
        None, "directory to write; default: export/TO in the run directory"
    )
    base_model: Text | None = key(None, "target model to name in config.json; default: the run's")
    trust_remote_code: Bool = key(False, "allow Python code from the target model's repository")
    license: Text | None = key(None, "license in the model card; default: the target model's")
    push_to_hub: Text | None = key(None, "hub repository (OWNER/NAME) to upload the export to")
    private: Bool = key(True, "create the repository of push_to_hub as private")
