"""Every key of every command: type, default, meaning. Knows neither files nor torch.

Names are Axolotl's, so that its YAMLs work, and those of the Medusa fork of Axolotl (`medusa_*`). Where a YAML is
silent the Medusa paper's settings hold. An empty key (null) means the default.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from medusa_train.config.constraints import (
    SELFDISTILL_CONSTRAINTS,
    TRAIN_CONSTRAINTS,
    find_ineffective_keys,
    implies_joint_training,
)
from medusa_train.config.drafts import (
    SECTIONS,
    AmphistaConfig,
    DraftConfig,
    HydraConfig,
    KangarooConfig,
    MedusaConfig,
)
from medusa_train.config.types import (
    Bool,
    BoolOrAuto,
    Config,
    Constraint,
    ExportTarget,
    ExportTargets,
    Float,
    Int,
    Interval,
    Resume,
    Schedule,
    Text,
    TextList,
    TextOrMapping,
    key,
)

#: Axolotl keys that mean nothing here: accepted whatever they hold, and listed as ignored.
IGNORED_AXOLOTL_KEYS = frozenset(
    {
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
    }
)

#: Known keys whose question this program answers by itself; listed as ignored where they are set.
#: (The classes follow from the backbone's own config.json, and batches are padded to their longest row.)
AUTOMATIC_KEYS = (
    "model_type",
    "tokenizer_type",
    "base_model_config",
    "pad_to_sequence_len",
    "special_tokens",
)

Optimizer = Literal["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"]


class DatasetConfig(BaseModel):
    """One entry of `datasets`."""

    model_config = ConfigDict(extra="forbid")

    path: Text = key(..., "file (JSONL, JSON or parquet) or directory of them, or a dataset name on the hub")
    type: Literal["auto", "sharegpt", "messages", "alpaca"] = key("auto", "form of a record; auto: by its keys")
    conversation: Text | None = key(None, "chat template by name for this dataset (vicuna_v1.1, zephyr, ...)")
    split: Text | None = key(None, "split of a hub dataset (default: train)")
    name: Text | None = key(None, "configuration of a hub dataset")
    weight: Float | None = key(
        None,
        "share of an epoch's conversations, relative to the other weights (1 where only others have one); "
        "default: every conversation once",
        gt=0,
    )


class TrainConfig(Config):
    """Keys of `medusa-train`."""

    # Backbone
    base_model: Text = key(..., "the backbone: a Hugging Face directory or a name on the hub")
    base_model_config: Text | None = key(None, "ignored: the backbone's own config.json is read")
    model_type: Text | None = key(None, "ignored: the class follows from config.json")
    tokenizer_type: Text | None = key(None, "ignored: the class follows from the tokenizer's files")
    trust_remote_code: Bool = key(False, "run Python code that the backbone's repository ships")
    load_in_4bit: Bool = key(False, "quantise the backbone to NF4 (bitsandbytes)")
    load_in_8bit: Bool = key(False, "quantise the backbone to 8 bits (bitsandbytes)")
    special_tokens: dict[str, Any] | None = key(None, "ignored: the tokenizer's own special tokens are used")

    # Draft heads
    recipe: Literal["medusa1", "medusa2"] | None = key(
        None, "medusa1: frozen backbone; medusa2: joint training. Default: medusa2 where a key asks for it"
    )
    draft: Literal["medusa", "hydra", "amphista", "kangaroo"] = key(
        "medusa", "the kind of draft that is trained; the others learn over a frozen backbone"
    )
    hydra: HydraConfig | None = key(None, "keys of draft: hydra")
    amphista: AmphistaConfig | None = key(None, "keys of draft: amphista")
    kangaroo: KangarooConfig | None = key(None, "keys of draft: kangaroo")
    medusa_num_heads: Int = key(5, "K: head k predicts k tokens beyond the next one", ge=1, le=32)
    medusa_num_layers: Int = key(1, "residual blocks per head; 0: only the head's own lm_head", ge=0, le=32)
    medusa_decay_coefficient: Float = key(0.8, "c: head k's loss counts c**k", gt=0, le=1)
    medusa_heads_coefficient: Float = key(0.2, "lambda0: the heads' loss in joint training (medusa2 only)", ge=0)
    medusa_scheduler: Schedule = key(
        "constant",
        "lambda0 over the run (medusa2): constant, linear, sine, or sine_R (sine until the share R)",
    )
    medusa_only_heads: Bool | None = key(None, "true: train the heads only (recipe medusa1)")
    medusa_lr_multiplier: Float | None = key(
        None, "a draft's learning rate is learning_rate times this; default: 4 for Medusa's heads, else 1", gt=0
    )
    medusa_self_distillation: Bool = key(False, "LM loss is KL to the backbone without adapter (medusa2)")
    medusa_distillation_regularization: Float = key(0.0, "rho: share of the teacher in the LM target", ge=0, le=1)
    medusa_soft_targets: Float = key(0.0, "share of the backbone's own distribution in the heads' targets", ge=0, le=1)
    medusa_num_unfreeze_layers: Int = key(0, "train the last N layers, final norm and lm_head too", ge=0)
    medusa_logging: Bool = key(False, "log the top-k accuracy of each head while training")
    medusa_share_lm_head: Bool = key(False, "heads use the backbone's lm_head, without a matrix of their own")
    medusa_vocab_size: Int | None = key(
        None, "N: heads guess only the N most frequent tokens of the training text; default: all tokens", ge=16
    )
    calibration_tokens: Int = key(6000, "greedy tokens on held-out prompts that fit the tree; 0: no tree", ge=0)

    # Adapter
    adapter: Literal["lora", "qlora"] | None = key(None, "train the backbone through an adapter (medusa2)")
    lora_r: Int = key(32, "rank of the adapter", ge=1)
    lora_alpha: Int = key(16, "scale of the adapter: lora_alpha / lora_r", ge=1)
    lora_dropout: Float = key(0.05, "dropout before the adapter", ge=0, lt=1)
    lora_target_modules: TextList | None = key(None, "names of the linear layers that get an adapter")
    lora_target_linear: Bool = key(False, "every linear layer gets an adapter")
    lora_modules_to_save: TextList | None = key(None, "modules trained whole beside the adapter")
    lora_model_dir: Text | None = key(None, "run whose heads and adapter this one starts from (stage two)")

    # Data
    datasets: list[DatasetConfig] = key(..., "what to train on", min_length=1)
    dataset_prepared_path: Text | None = key(None, "directory that keeps tokenised data for the next run")
    sequence_len: Int = key(2048, "longest conversation in tokens; longer ones are cut at a turn's end", ge=4)
    sample_packing: Bool = key(False, "several whole conversations in one row of sequence_len tokens")
    pad_to_sequence_len: Bool | None = key(None, "ignored: rows are padded to the longest of their batch")
    chat_template: Text | None = key(
        None, "chat template by name; default: the `conversation` of all datasets, else the tokenizer's own"
    )
    roles_to_train: list[Literal["assistant", "user", "system"]] = key(
        ["assistant"], "whose words are learned", min_length=1
    )
    train_on_inputs: Bool = key(False, "learn every token, prompts included")
    val_set_size: Float = key(0.05, "share of the conversations held out for evaluation", ge=0, lt=1)
    skip_bad_records: Bool = key(False, "leave out records that cannot be read, instead of stopping")

    # Optimisation
    micro_batch_size: Int = key(1, "conversations per forward pass; rows of them with sample_packing", ge=1)
    gradient_accumulation_steps: Int = key(1, "forward passes per optimizer step", ge=1)
    num_epochs: Float = key(2, "passes over the data", gt=0)
    max_steps: Int | None = key(None, "stop after so many optimizer steps, whatever num_epochs says", ge=1)
    optimizer: Optimizer = key("adamw_torch", "the optimizer")
    lr_scheduler: Literal["cosine", "linear", "constant", "constant_with_warmup"] = key(
        "cosine", "learning rate after the warm-up; constant: without one"
    )
    cosine_min_lr_ratio: Float = key(0.0, "where cosine ends, as a share of the peak", ge=0, lt=1)
    learning_rate: Float = key(5e-4, "peak learning rate of the backbone; the heads': medusa_lr_multiplier", gt=0)
    warmup_steps: Int | None = key(None, "optimizer steps of linear warm-up", ge=0)
    warmup_ratio: Float | None = key(None, "the same as a share of the run", ge=0, lt=1)
    weight_decay: Float = key(0.0, "weight decay (matrices only)", ge=0)
    max_grad_norm: Float = key(1.0, "clip the gradient to this norm; 0: never", ge=0)
    max_nonfinite_steps: Int = key(
        0, "steps whose loss or gradient is not finite that a run may skip, in all; one more ends it", ge=0
    )
    seed: Int = key(42, "seed of every random choice", ge=0)

    # Numbers and memory
    bf16: BoolOrAuto = key("auto", "compute in bfloat16; auto: where the device does it well")
    fp16: Bool = key(False, "compute in float16 with loss scaling (on a GPU; CPUs take float32)")
    tf32: Bool = key(False, "let float32 products use TF32")
    gradient_checkpointing: Bool = key(False, "recompute activations (medusa2; medusa1 keeps none)")
    flash_attention: BoolOrAuto = key("auto", "flash-attn's varlen kernel on packed rows; auto: where it can be had")
    deepspeed: TextOrMapping | None = key(
        None, "DeepSpeed configuration: a JSON file (configs/deepspeed/zero2.json) or a mapping"
    )

    # Run
    output_dir: Text = key("runs/medusa", "the run directory")
    overwrite_output_dir: Bool = key(False, "start anew in a directory that already holds a run")
    resume_from_checkpoint: Resume = key(None, "true or auto: go on from the newest checkpoint; or its path")
    logging_steps: Int = key(10, "optimizer steps between lines of metrics", ge=1)
    eval_steps: Interval | None = key(None, "optimizer steps (below 1: share of the run) between evaluations")
    evals_per_epoch: Int | None = key(None, "the same by epochs; default: one per epoch", ge=1)
    save_steps: Interval | None = key(None, "optimizer steps (below 1: share of the run) between checkpoints")
    saves_per_epoch: Int | None = key(None, "the same by epochs; default: one per epoch", ge=1)
    save_total_limit: Int = key(2, "checkpoints kept: the newest ones, and the best in evaluation besides", ge=1)
    early_stopping_patience: Int | None = key(
        None, "stop after so many evaluations without progress, and take the best one", ge=1
    )
    export: ExportTargets | None = key(None, "layouts to write to output_dir/export at the end, as medusa-export does")
    use_tensorboard: Bool = key(False, "write TensorBoard event files to output_dir/tensorboard, where it is installed")
    wandb_project: Text | None = key(None, "report to this Weights & Biases project")
    wandb_entity: Text | None = key(None, "team or user of that project")
    wandb_run_id: Text | None = key(None, "run to go on with there")

    ignored_axolotl_keys: ClassVar[frozenset[str]] = IGNORED_AXOLOTL_KEYS
    constraints: ClassVar[tuple[Constraint, ...]] = TRAIN_CONSTRAINTS

    @property
    def ignored(self) -> tuple[str, ...]:
        """Foreign keys that were set, those that this program answers by itself, and those `ineffective_keys`."""
        answered = {name for name in AUTOMATIC_KEYS if getattr(self, name) not in (None, False)}
        idle = {name for name in self.ineffective_keys if name in self.model_fields_set and self._asks(name)}
        return tuple(sorted({*self._ignored, *answered, *idle}))

    @property
    def ineffective_keys(self) -> tuple[str, ...]:
        """Keys of joint training where the backbone is frozen, of an adapter where there is none, and their like."""
        return tuple(find_ineffective_keys(self))

    @property
    def draft_config(self) -> DraftConfig:
        """What is trained: the section of `draft`, with its defaults where there is none; of Medusa's keys its own."""
        if self.draft != "medusa":
            return getattr(self, self.draft) or SECTIONS[self.draft]()
        flat = {name: getattr(self, f"{MedusaConfig.prefix}{name}") for name in MedusaConfig.model_fields}
        return MedusaConfig(**flat)

    @property
    def heads_learning_rate(self) -> float:
        """Peak learning rate of the heads, in every recipe: `learning_rate` x `medusa_lr_multiplier`."""
        return self.learning_rate * self._lr_multiplier

    @property
    def _lr_multiplier(self) -> float:
        """The default is Medusa's (section 4.1); the recipes of the other drafts know no such factor."""
        return self.medusa_lr_multiplier or (4.0 if self.draft == "medusa" else 1.0)

    def resolved(self) -> TrainConfig:
        """Fill in what follows from other keys.

        The section of `draft` is filled with its defaults. `recipe` and `medusa_only_heads` follow each from the other
        or from the keys of joint training; `chat_template` from the datasets, where all name the same `conversation`:
        the backbone is then asked in the form that its heads were trained in.
        """
        recipe = self.recipe or ("medusa2" if implies_joint_training(self) else "medusa1")
        forms = {entry.conversation for entry in self.datasets}
        template = self.chat_template or (forms.pop() if len(forms) == 1 else None)
        follows: dict[str, Any] = {
            "recipe": recipe,
            "medusa_only_heads": recipe == "medusa1",
            "chat_template": template,
            "medusa_lr_multiplier": self._lr_multiplier,
        }
        if self.draft != "medusa":
            follows[self.draft] = self.draft_config
        return self.model_copy(update=follows)

    def _asks(self, name: str) -> bool:
        """Whether a key holds more than `false`, 0 or null where that is its default anyway."""
        value = getattr(self, name)
        return bool(value) or value != type(self).model_fields[name].default


class EvalConfig(Config):
    """Keys of `medusa-eval`."""

    bench: Text = key("tiny", "questions: tiny, mtbench, specbench, humaneval, gsm8k, or a file of them")
    model: Text | None = key(None, "run directory, or directory of heads; default: the newest run under runs/")
    base_model: Text | None = key(None, "backbone; default: the one that the run or the heads name")
    trust_remote_code: Bool = key(False, "run Python code that the backbone's repository ships")
    chat_template: Text | None = key(None, "chat template by name; default: the run's, else the tokenizer's own")
    tree: Text | None = key(None, "tree file; default: the tree.json beside the heads")
    max_new_tokens: Int = key(256, "longest answer in tokens", ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "auto: fastest here for plain decoding")
    compile: Bool = key(False, "compile decoding passes with torch.compile: up to a minute more to start, faster steps")
    limit: Int | None = key(None, "only the first so many questions", ge=1)
    output_dir: Text | None = key(None, "where the report goes; default: eval/BENCH in the run directory")
    warmup: Int = key(2, "questions answered beforehand, untimed", ge=0)
    exactness: Bool = key(True, "compare all answers with plain decoding in float32 as well")
    prompt_lookup: Bool = key(True, "measure prompt-lookup decoding of transformers too")
    assistant_model: Text | None = key(None, "small model of the same tokens: measure assisted generation with it too")
    judge_base_url: Text | None = key(None, "OpenAI-compatible server whose judge_model grades the answers")
    judge_model: Text | None = key(None, "model of that server; without one nothing is judged")
    judge_concurrency: Int = key(4, "answers that are graded at a time", ge=1)
    calibration_tokens: Int = key(12000, "greedy tokens on held-out prompts that --calibrate looks at", ge=100)
    seed: Int = key(42, "seed of every random choice", ge=0)


class SelfDistillConfig(Config):
    """Keys of `medusa-selfdistill`."""

    # Seeds
    seed_dataset: Text = key(
        "tiny", "prompts: tiny, sharegpt, ultrachat, a file or directory of conversations, or a dataset on the hub"
    )
    type: Literal["auto", "sharegpt", "messages", "alpaca"] = key("auto", "form of a record; auto: by its keys")
    split: Text | None = key(None, "split of a hub dataset (default: train)")
    skip_bad_records: Bool = key(False, "leave out records that cannot be read, instead of stopping")
    max_turns: Int | None = key(None, "only the first so many of the user's turns of each conversation", ge=1)
    min_chars: Int | None = key(None, "leave out conversations whose user says less, in characters", ge=1)
    max_chars: Int | None = key(None, "leave out conversations whose user says more, in characters", ge=1)
    sample: Int | None = key(None, "draw so many of the conversations at random; default: all", ge=1)
    sample_seed: Int = key(42, "seed of that draw", ge=0)
    limit: Int | None = key(None, "only the first so many conversations", ge=1)

    # Conversations
    mode: Literal["replay", "selftalk"] = key(
        "replay", "replay: the user's turns are fed in; selftalk: only the first one, the model writes both roles"
    )
    rounds: Int = key(5, "answers in a conversation of selftalk at most", ge=1)
    temperature: Float = key(0.3, "of sampling; 0: greedy", ge=0)
    top_p: Float = key(1.0, "sample from the smallest set of tokens with this probability", gt=0, le=1)
    top_k: Int | None = key(None, "sample from so many of the most probable tokens; default: from all", ge=1)
    max_new_tokens: Int = key(2048, "longest answer in tokens", ge=1)
    drop_truncated: Bool = key(True, "drop an answer that hit max_new_tokens, and the turns after it")
    drop_looping: Bool = key(False, "drop an answer that says eight words three times, and the turns after it")
    seed: Int = key(42, "seed of sampling", ge=0)

    # Who answers
    engine: Literal["local", "openai"] | None = key(
        None, "local: the model in this process; openai: any server of OpenAI's protocol. Default: by server_url"
    )
    base_model: Text | None = key(
        None, "the model: a Hugging Face directory, a hub name, a run; on a server its name there. Default: data/tiny"
    )
    trust_remote_code: Bool = key(False, "run Python code that the model's repository ships")
    chat_template: Text | None = key(None, "chat template by name; default: the tokenizer's own")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "auto: fastest on this device")
    batch_size: Int | None = key(
        None, "conversations that this process answers at a time; default: 16, in float32 and with heads 1", ge=1
    )
    heads: Text | None = key(None, "run or directory of heads that speculate; base_model defaults to theirs")
    server_url: Text | None = key(None, "the server's address, http://HOST:PORT/v1")
    concurrency: Int = key(16, "requests that the server works on at a time", ge=1, le=1024)
    request_timeout: Float = key(600.0, "seconds that the server may take for an answer", gt=0)
    retry_seconds: Float = key(900.0, "give up on a server that has not answered for so long", ge=0)
    api_key_env: Text = key("OPENAI_API_KEY", "environment variable that holds the server's key")
    output: Text | None = key(None, "JSONL file to write; default: runs/selfdistill/SEED_DATASET.jsonl")

    constraints: ClassVar[tuple[Constraint, ...]] = SELFDISTILL_CONSTRAINTS

    def resolved(self) -> SelfDistillConfig:
        """Fill in `engine` (openai where `server_url` is set) and `base_model` (data/tiny; none with `heads`)."""
        engine = self.engine or ("openai" if self.server_url else "local")
        base = self.base_model or ("data/tiny" if self.heads is None else None)
        return self.model_copy(update={"engine": engine, "base_model": base})


class ExportConfig(Config):
    """Keys of `medusa-export`."""

    run: Text | None = key(None, "run directory, or directory of heads; default: the newest run under runs/")
    to: ExportTarget = key("reference", "whose layout to write; merged: the backbone of a joint run, for everybody")
    output_dir: Text | None = key(None, "where to; default: export/TO in the run directory")
    base_model: Text | None = key(None, "backbone that config.json is to name; default: the one that the run names")
    license: Text | None = key(None, "licence for the model card; default: the base model's")
    push_to_hub: Text | None = key(None, "upload what was written to this repository (OWNER/NAME) of the hub")
    private: Bool = key(True, "a repository that push_to_hub makes can be seen by its owner alone")
