"""The backbone as a recipe trains it: frozen, with an adapter, or with its last layers free. Knows no loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.utils import is_flash_attn_2_available

from medusa_train.checkpoint.resolve import heads_layout
from medusa_train.checkpoint.run_layout import ADAPTER, HEADS, MODEL
from medusa_train.config.paths import resolve_path
from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import Batch
from medusa_train.errors import BackboneError, CheckpointError, ConfigError
from medusa_train.models.attention import FLASH, flash_obstacle
from medusa_train.models.backbone import Backbone
from medusa_train.models.features import PLAIN, Features, FeatureSpec
from medusa_train.models.lm_head import LMHead
from medusa_train.models.lora import Adapter, LoraSpec, read_adapter_config
from medusa_train.models.precision import Precision

ADAPTER_FILE = "adapter_config.json"


@dataclass
class BackboneRecipe:
    """What runs forward in training, and what of it learns.

    Attributes:
        backbone: the model. adapter: its LoRA, or None.
        parameters: what is trained of it, by name; empty where it is frozen (Medusa-1).
    """

    backbone: Backbone
    precision: Precision
    adapter: Adapter | None = None
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def joint(self) -> bool:
        """Whether the backbone learns together with the heads (Medusa-2)."""
        return bool(self.parameters)

    def train(self, mode: bool = True) -> None:
        """Switch dropout on or off; a frozen backbone has none in either mode."""
        self.backbone.model.train(mode and self.joint)

    def features(self, batch: Batch, need: FeatureSpec = PLAIN) -> Features:
        """One forward pass over `batch` for what a draft needs; keeps a graph only where something in it learns."""
        with torch.set_grad_enabled(self.joint and torch.is_grad_enabled()), self._autocast():
            return self.backbone.run(batch.tokens, positions=batch.positions, segments=batch.segments, need=need)

    def unembedding(self) -> LMHead:
        """lm_head as it is being trained."""
        return self.backbone.unembedding()

    def teacher(self, batch: Batch, own: Features) -> tuple[Features, LMHead]:
        """Features and unembedding of the backbone as it was: the adapter off; the frozen backbone is its own."""
        if self.adapter is None:
            return Features(own.hidden.detach()), self.unembedding()
        with self.adapter.teacher():
            with self._autocast():
                feats = self.backbone.run(batch.tokens, positions=batch.positions, segments=batch.segments)
            return feats, self.unembedding()

    def state_dict(self) -> dict[str, Tensor]:
        """Everything of the backbone that learns."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            ValueError: other parameters, or other shapes.
        """
        if set(state) != set(self.parameters):
            raise ValueError(f"{len(set(state) ^ set(self.parameters))} trained parameters of the backbone differ")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if parameter.shape != state[name].shape:
                    raise ValueError(f"{name} has shape {list(parameter.shape)}, saved is {list(state[name].shape)}")
                parameter.copy_(state[name])

    def publish(self, out: Path) -> None:
        """Write what was learned: adapter/ for LoRA, model/ (the whole backbone) where layers were trained."""
        if self.adapter is not None:
            self.adapter.save(out / ADAPTER)
        elif self.joint:
            self.backbone.model.to(self.precision.dtype).save_pretrained(out / MODEL, safe_serialization=True)
            self.backbone.tokenizer.save_pretrained(out / MODEL)

    def _autocast(self) -> Any:
        # a frozen backbone runs in its own dtype; trained parts are float32 and meet bfloat16 layers
        return self.precision.autocast() if self.joint else torch.autocast(self.precision.device.type, enabled=False)


def build_backbone_recipe(cfg: TrainConfig, backbone: Backbone, precision: Precision) -> BackboneRecipe:
    """Prepare `backbone` for the recipe: nothing, an adapter (fresh or from `lora_model_dir`), or free layers.

    Raises:
        BackboneError: the adapter's targets don't fit. CheckpointError: `lora_model_dir` holds nothing to start from.
    """
    if cfg.recipe == "medusa1":
        return BackboneRecipe(backbone, precision)
    if cfg.gradient_checkpointing:
        backbone.model.gradient_checkpointing_enable({"use_reentrant": False})
    adapter = None
    if cfg.adapter is not None:
        adapter = _adapter(cfg, backbone)
    else:
        _free(backbone, cfg.medusa_num_unfreeze_layers or None)
    trained = {name: p for name, p in backbone.model.named_parameters() if p.requires_grad}
    return BackboneRecipe(backbone, precision, adapter, trained)


def check_initial_weights(cfg: TrainConfig) -> None:
    """Refuse a `lora_model_dir` that this run can't start from; asked before anything is loaded.

    Raises:
        CheckpointError: it holds neither heads nor an adapter.
        ConfigError: its heads belong to an adapter or a model of its own, and this run would train on without it; or
            the adapter was made otherwise than the configuration says.
    """
    if cfg.lora_model_dir is None:
        return
    home, backbone = resolve_path(cfg.lora_model_dir), resolve_path(cfg.base_model)
    adapter = find_initial_adapter(cfg)
    if home is None or (adapter is None and find_initial_heads(cfg) is None):
        raise CheckpointError(
            f"lora_model_dir: {cfg.lora_model_dir} holds neither heads nor an adapter. Train stage one into it first "
            f"(for example medusa-train configs/tiny_m1.yaml), or leave the key out to start from untrained heads."
        )
    if adapter is not None and (cfg.recipe == "medusa1" or cfg.adapter is None):
        raise ConfigError(
            f"lora_model_dir: {cfg.lora_model_dir} was trained jointly: its heads belong to the adapter in {adapter}, "
            "and this run would drop it. Go on with recipe: medusa2 and an adapter, or name a run of heads alone"
        )
    if adapter is not None:
        _check_adapter(cfg, adapter)
    model = home / MODEL
    if model.is_dir() and (backbone is None or backbone.resolve() != model.resolve()):
        raise ConfigError(
            f"lora_model_dir: {cfg.lora_model_dir} was trained jointly: its heads belong to the backbone in {model}, "
            f"not to {cfg.base_model}. Set base_model: {model}, or name a run of heads alone"
        )


def _check_adapter(cfg: TrainConfig, directory: Path) -> None:
    """Compare what the configuration says of the adapter with the one that would be trained on."""
    made = read_adapter_config(directory)
    targets = made.get("target_modules") or ()
    stored = {
        "lora_r": made.get("r"),
        "lora_alpha": made.get("lora_alpha"),
        "lora_dropout": made.get("lora_dropout"),
        "lora_target_modules": [targets] if isinstance(targets, str) else sorted(targets),
    }
    said = {key: getattr(cfg, key) for key in stored if key in cfg.model_fields_set and getattr(cfg, key) is not None}
    if "lora_target_modules" in said:
        said["lora_target_modules"] = sorted(said["lora_target_modules"])
        if cfg.lora_target_linear:
            del said["lora_target_modules"]  # it stands above them
    if unlike := [key for key in said if said[key] != stored[key]]:
        theirs, ours = (", ".join(f"{key}: {of[key]}" for key in unlike) for of in (stored, said))
        raise ConfigError(
            f"lora_model_dir: the adapter in {directory} was made with {theirs}, the configuration asks for {ours}"
        )


def find_initial_heads(cfg: TrainConfig) -> Path | None:
    """The heads of the run that `lora_model_dir` names, or that directory itself, whoever wrote them."""
    return _start(cfg, HEADS, lambda path: heads_layout(path) is not None)


def find_initial_adapter(cfg: TrainConfig) -> Path | None:
    """The adapter of the run that `lora_model_dir` names, or that directory itself."""
    return _start(cfg, ADAPTER, lambda path: (path / ADAPTER_FILE).is_file())


def _start(cfg: TrainConfig, name: str, holds: Callable[[Path], bool]) -> Path | None:
    home = None if cfg.lora_model_dir is None else resolve_path(cfg.lora_model_dir)
    return None if home is None else next((path for path in (home / name, home) if holds(path)), None)


def _adapter(cfg: TrainConfig, backbone: Backbone) -> Adapter:
    earlier = find_initial_adapter(cfg)
    if earlier is not None:
        return Adapter.load(backbone, earlier, trainable=True)
    targets = tuple(cfg.lora_target_modules or ())
    spec = LoraSpec(
        r=cfg.lora_r,
        alpha=cfg.lora_alpha,
        dropout=cfg.lora_dropout,
        targets=None if cfg.lora_target_linear or not targets else targets,
        modules_to_save=tuple(cfg.lora_modules_to_save or ()),
    )
    return Adapter.attach(backbone, spec)


def _free(backbone: Backbone, layers: int | None) -> None:
    """Make the last `layers` decoder layers (all with None), the final norm and lm_head trainable, in float32.

    With all layers the embeddings learn too: full joint training.

    Raises:
        BackboneError: the architecture keeps its layers or its norm under other names.
    """
    body = backbone.body
    if layers is None:
        free: list[nn.Module] = [backbone.model]
    elif hasattr(body, "layers") and hasattr(body, "norm"):
        free = [*body.layers[-layers:], body.norm, backbone.head]
    else:
        raise BackboneError(f"medusa_num_unfreeze_layers: the layers of {type(body).__name__} can't be told apart here")
    for module in free:
        module.float().requires_grad_(True)


def choose_attention(backbone: Backbone, wanted: bool | Literal["auto"], *, packed: bool) -> str:
    """Let `backbone` keep packed conversations apart in the fastest way that is certain to; say in one line which.

    Rows of one conversation each need no mask: torch's sdpa has a flash kernel of its own for them. Packed ones do,
    and a mask bars sdpa from that kernel; flash-attn's varlen kernel takes their bounds instead.

    Args:
        backbone: as it was loaded, before any of it is converted for training.
        wanted: the key `flash_attention`; asked for where it can't be had, the line says why.
        packed: whether rows hold several conversations.
    """
    plain = backbone.attention
    if not packed:
        return f"attention: torch's {plain}, causal (rows of one conversation need no mask)"
    obstacle: str | None = "flash_attention: false"
    if wanted:
        obstacle = flash_obstacle(
            backbone.device.type,
            backbone.dtype,
            capped=plain == "eager",
            known=bool(getattr(backbone.model, "_supports_flash_attn", False)),
            installed=is_flash_attn_2_available(),
        )
    if obstacle is None:
        try:
            backbone.use_varlen(FLASH)
            return "attention: flash-attn's varlen kernel, told where each conversation ends"
        except (BackboneError, ImportError, RuntimeError, ValueError) as error:
            obstacle = str(error).partition("\n")[0]
    return f"attention: torch's {plain} with a block-diagonal mask for packed rows ({obstacle})"
