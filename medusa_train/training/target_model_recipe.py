"""Prepare the target model for a recipe: frozen (Medusa-1), with LoRA, or with trainable layers
(Medusa-2).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.checkpoint.resolve import find_initial_adapter
from medusa_train.checkpoint.run_directory import ADAPTER, MODEL
from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import Batch
from medusa_train.errors import TargetModelError
from medusa_train.models.compiled import compile_layers
from medusa_train.models.hf_config import decoder_of
from medusa_train.models.lm_head import LMHead
from medusa_train.models.lora import Adapter, LoraSpec
from medusa_train.models.partitioned import full_shape, gathered, is_partitioned, to_float32
from medusa_train.models.precision import Precision, exact_buffers
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates
from medusa_train.training.distributed import DistributedContext
from medusa_train.training.hidden_states import HiddenStateCache


@dataclass
class TargetModelRecipe:
    """The target model in training, and which of its parameters are trained.

    Attributes:
        parameters: the target model's trained parameters by name; empty if it is frozen (Medusa-1).
        cache: cache of a frozen target model's hidden states on disk (`cache_hidden_states`).
        compiled: context in which a frozen target model runs compiled layers (`torch_compile`).
    """

    target_model: TargetModel
    precision: Precision
    adapter: Adapter | None = None
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    cache: HiddenStateCache | None = None
    compiled: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def joint(self) -> bool:
        """Whether the target model is trained together with the heads (Medusa-2)."""
        return bool(self.parameters)

    def train(self, mode: bool = True) -> None:
        """Set train or eval mode; a frozen target model always stays in eval mode."""
        self.target_model.model.train(mode and self.joint)

    def hidden_states(self, batch: Batch, aux_layers: tuple[int, ...] = ()) -> HiddenStates:
        """Return the states that a draft needs, from the cache if there is one, otherwise from a
        forward pass of the target model.
        """
        if self.cache is None:
            return self._run(batch, aux_layers)
        return self.cache.hidden_states(batch, lambda: self._run(batch, aux_layers))

    def _run(self, batch: Batch, aux_layers: tuple[int, ...]) -> HiddenStates:
        """Run the target model on `batch`, without an autograd graph if it is frozen."""
        has_graph = self.joint and torch.is_grad_enabled()
        with torch.set_grad_enabled(has_graph), self._autocast(), self.compiled():
            return self.target_model.run(
                batch.tokens,
                positions=batch.positions,
                segments=batch.segments,
                aux_layers=aux_layers,
            )

    def teacher(self, batch: Batch, hidden_states: HiddenStates) -> tuple[Tensor, LMHead]:
        """Return hidden states [B, T, d] and lm_head of the teacher: the target model with its
        adapter disabled.

        A target model without an adapter is its own teacher, with the given `hidden_states`.
        """
        if self.adapter is None:
            return hidden_states.final.detach(), self.target_model.lm_head()
        with self.adapter.teacher():
            return self._run(batch, ()).final, self.target_model.lm_head()

    @property
    def saved(self) -> list[nn.Parameter]:
        """The parameters that `save_trained` writes."""
        if self.joint and self.adapter is None:
            return list(self.target_model.model.parameters())
        return list(self.parameters.values())

    def load_state_dict(self, state: dict[str, Tensor], distributed: DistributedContext) -> None:
        """Load the trained parameters by name; ValueError if names or shapes differ.

        `state` has whole tensors. If parameters are partitioned, only rank 0 reads the values.
        """
        different = set(state) ^ set(self.parameters)
        if different:
            raise ValueError(f"{len(different)} trained parameters of the target model differ")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                shape = full_shape(parameter)
                if shape != state[name].shape:
                    raise ValueError(
                        f"{name}: shape {list(shape)}, saved shape {list(state[name].shape)}"
                    )
                read = distributed.is_main or not is_partitioned(parameter)
                with gathered([parameter], modify=True):
                    if read:
                        parameter.copy_(state[name])

    def save_trained(self, out: Path) -> None:
        """Write adapter/ for LoRA, or model/ (the whole target model) if its
        layers were trained.
        """
        if self.adapter is not None:
            self.adapter.save(out / ADAPTER)
        elif self.joint:
            with exact_buffers(self.target_model.model):  # the tree is chosen with this model later
                self.target_model.model.to(self.precision.dtype)
            self.target_model.save(out / MODEL)

    def _autocast(self) -> Any:
        # A trained target model mixes float32 (trained) and bfloat16 (frozen) weights, so it needs
        # autocast. A frozen one computes in the dtype of its weights.
        if self.joint:
            return self.precision.autocast()
        return torch.autocast(self.precision.device.type, enabled=False)


def build_target_model_recipe(
    cfg: TrainConfig, target_model: TargetModel, precision: Precision
) -> TargetModelRecipe:
    """Attach or load an adapter, or unfreeze layers, as the recipe requires; otherwise the target
    model stays frozen.
    """
    # 1. A frozen target model.
    if cfg.recipe == "medusa1":
        recipe = TargetModelRecipe(target_model, precision)
        if cfg.torch_compile:
            recipe.compiled = compile_layers(target_model.layers)
        return recipe
    # 2. An adapter, or unfrozen layers.
    if cfg.gradient_checkpointing is True:
        target_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    adapter = None
    if cfg.adapter is not None:
        adapter = _build_adapter(cfg, target_model)
    else:
        _unfreeze(target_model.model, cfg.medusa_num_unfreeze_layers)
    trained = {name: p for name, p in target_model.model.named_parameters() if p.requires_grad}
    return TargetModelRecipe(target_model, precision, adapter, trained)


def _build_adapter(cfg: TrainConfig, target_model: TargetModel) -> Adapter:
    """Load the adapter of the run that this one starts from, or attach a new one."""
    if (initial := find_initial_adapter(cfg.initial_run)) is not None:
        return Adapter.load(target_model, initial, trainable=True)
    targets = None
    if cfg.lora_target_modules and not cfg.lora_target_linear:
        targets = tuple(cfg.lora_target_modules)
    saved = tuple(cfg.lora_modules_to_save or ())
    spec = LoraSpec(cfg.lora_r, cfg.lora_alpha, cfg.lora_dropout, targets, saved)
    return Adapter.attach(target_model, spec)


def _unfreeze(model: Any, layers: int) -> None:
    """Make the last `layers` decoder layers, the final norm and lm_head trainable in float32;
    0: the whole model and its embeddings.
    """
    modules = [model]
    if layers:
        body = decoder_of(model)
        if not (hasattr(body, "layers") and hasattr(body, "norm")):
            raise TargetModelError(
                f"medusa_num_unfreeze_layers: {type(body).__name__} has no `layers` and `norm` to"
                " unfreeze"
            )
        modules = [*body.layers[-layers:], body.norm, model.get_output_embeddings()]
    for module in modules:
        to_float32(module)
        module.requires_grad_(True)
    embedding = model.get_input_embeddings()
    if layers and embedding.weight is model.get_output_embeddings().weight:
        # The embedding is tied to lm_head, which is trained. Without `detach`, gradients would also
        # flow through the frozen layers.
        embedding.register_forward_hook(lambda module, args, out: out.detach())
