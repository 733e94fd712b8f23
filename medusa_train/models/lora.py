"""Train, load, save and merge a LoRA adapter in a target model's layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from medusa_train import checksums
from medusa_train.errors import CheckpointError, TargetModelError
from medusa_train.io import warn_once
from medusa_train.models.finite import describe_not_finite
from medusa_train.models.model_files import ADAPTER_CONFIG, read_adapter_config
from medusa_train.models.target_model import TargetModel

LM_HEAD = "lm_head"


@dataclass(frozen=True)
class LoraSpec:
    """Hyperparameters of a LoRA adapter.

    Attributes:
        r: rank of the branch.
        alpha: the branch is scaled by alpha / r.
        dropout: dropout probability on the branch's input.
        targets: names of linear layers (`q_proj`, `lm_head`, ...); None: all linear layers, lm_head
            included unless it is tied.
        modules_to_save: modules that are trained fully in addition to the adapter.
    """

    r: int = 32
    alpha: int = 16
    dropout: float = 0.05
    targets: tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] = ()


#: PEFT's file name for the weights of an adapter.
ADAPTER_WEIGHTS = "adapter_model.safetensors"


class Adapter:
    """A PEFT LoRA adapter in a target model's layers; `peft` is the PeftModel around
    `target_model.model`.

    PEFT modifies the transformers model in place, so `target_model` is used as before. Draft heads
    are not part of that model; otherwise PEFT would freeze them and add adapters to them.
    """

    def __init__(self, target_model: TargetModel, peft: Any) -> None:
        self.target_model = target_model
        self.peft = peft

    @classmethod
    def attach(cls, target_model: TargetModel, spec: LoraSpec) -> Adapter:
        """Add new trainable LoRA layers in float32 to `target_model`. They start with B = 0, so its
        outputs do not change.

        Raises:
            TargetModelError: a target is not a linear layer, or is an lm_head tied to the input
                embeddings, which merging would corrupt; or a name in `modules_to_save` matches no
                module.
        """
        from peft import LoraConfig, get_peft_model

        _check_modules(target_model, spec.modules_to_save)
        config = LoraConfig(
            r=spec.r,
            lora_alpha=spec.alpha,
            lora_dropout=spec.dropout,
            target_modules=_target_modules(target_model, spec.targets),
            modules_to_save=list(spec.modules_to_save) or None,
            task_type="CAUSAL_LM",
        )
        try:
            return cls(
                target_model, _trainable_in_float32(get_peft_model(target_model.model, config))
            )
        except ValueError as error:  # such as PEFT's error for dropout on fused experts
            advice = "set lora_dropout: 0, or lora_target_modules: [q_proj, k_proj, v_proj, o_proj]"
            raise TargetModelError(f"adapter: {error} {advice}") from error

    @classmethod
    def load(
        cls, target_model: TargetModel, directory: Path, *, trainable: bool = False
    ) -> Adapter:
        """Add the adapter saved in `directory`.

        Raises:
            CheckpointError: there is no adapter, or it does not fit the target model.
        """
        from peft import PeftModel

        unknown_entries = _unknown_entries(read_adapter_config(directory))
        if unknown_entries:
            warn_once(f"{directory / ADAPTER_CONFIG}: not read: {', '.join(unknown_entries)}")
        weights = directory / ADAPTER_WEIGHTS
        if weights.is_file():
            checksums.check(weights)
        try:
            with warnings.catch_warnings():
                # PEFT warns if the path of the model differs from the path in training
                warnings.simplefilter("ignore")
                warnings.filterwarnings("error", message="Found missing adapter keys")
                peft = PeftModel.from_pretrained(
                    target_model.model,
                    directory,
                    is_trainable=trainable,
                    use_safetensors=True,
                    local_files_only=True,
                )
        except SafetensorError as error:
            raise CheckpointError(f"{weights}: cannot be read as safetensors: {error}") from error
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # PEFT's many adapter types raise many types of errors
            raise CheckpointError(
                f"{directory}: cannot load this adapter into {target_model.name}: {error}"
            ) from error
        added = [
            (name, parameter)
            for name, parameter in peft.named_parameters()
            if "lora_" in name or "modules_to_save" in name
        ]
        problem = describe_not_finite(added)
        if problem is not None:
            raise CheckpointError(
                f"{weights}: {problem}: the file is damaged, or training failed; use an earlier"
                " checkpoint, or train again"
            )
        adapter = cls(target_model, _trainable_in_float32(peft))
        target_model.model.eval()
        return adapter

    def save(self, directory: Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors, without the target model's
        embedding matrices.
        """
        self.peft.save_pretrained(directory, safe_serialization=True, save_embedding_layers=False)
        checksums.add_checksum(Path(directory) / ADAPTER_WEIGHTS)

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters."""
        return [parameter for parameter in self.peft.parameters() if parameter.requires_grad]

    @contextmanager
    def teacher(self) -> Iterator[None]:
        """Within this context, run the original target model: adapter and dropout disabled, no
        gradients.

        For a target model that was loaded in 4 bits, the original is the 4-bit model.
        """
        model = self.target_model.model
        was_training = model.training
        was_trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        model.eval()
        try:
            with torch.no_grad(), self.peft.disable_adapter():
                yield
        finally:
            model.train(was_training)
            # on exit, PEFT makes all adapters trainable, even frozen ones
            for parameter, requires_grad in was_trainable:
                parameter.requires_grad_(requires_grad)

    def merge(self) -> None:
        """Merge the adapter into the target model's weights; dequantize a quantized model first.

        Merging into 4 bits would round the merged weights again. The original full-precision
        weights are not used either, because the adapter was not trained on them.
        """
        if getattr(self.target_model.model, "is_quantized", False):
            self._dequantize()
        try:
            self.target_model.model = self.peft.merge_and_unload()
        except NotImplementedError as error:  # for example an aLoRA adapter
            raise CheckpointError(f"this adapter cannot be merged: {error}") from error
        self.target_model.model.eval().requires_grad_(False)

    def _dequantize(self) -> None:
        from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

        config = self.peft.peft_config["default"]
        weights = get_peft_model_state_dict(self.peft, save_embedding_layers=False)
        self.peft = get_peft_model(self.peft.unload().dequantize(), config)
        set_peft_model_state_dict(self.peft, weights)


def _unknown_entries(config: Mapping[str, Any]) -> list[str]:
    """Return the entries of adapter_config.json that the installed PEFT ignores."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    config_class = PEFT_TYPE_TO_CONFIG_MAPPING.get(str(config["peft_type"]))
    if config_class is None:  # PEFT raises its own error
        return []
    names = {field.name for field in fields(config_class)}
    return sorted(name for name, value in config.items() if name not in names and value is not None)


def linear_names(model: Any) -> list[str]:
    """Return the last name components of all linear layers, including quantized ones and excluding
    routers; lm_head comes last.
    """
    names: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and "Router" not in str(type(module)):
            names.add(path.rpartition(".")[2])
    return sorted(names, key=lambda name: (name == LM_HEAD, name))


def default_targets(model: Any) -> list[str]:
    """Return the names of the linear layers that get LoRA by default: all except a tied lm_head."""
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return [name for name in linear_names(model) if not (tied and name == LM_HEAD)]


def layers_left_out(model: Any, directory: Path) -> list[str]:
    """Return the default targets that the LoRA adapter in `directory` does not train in at least
    one layer. `model` needs no weights.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    config = LoraConfig.from_pretrained(directory)
    targets = default_targets(model)
    trained_in_full = set(config.modules_to_save or ())
    left_out = set()
    for path, _ in model.named_modules():
        parts = path.split(".")
        if parts[-1] not in targets or trained_in_full.intersection(parts):
            continue
        if not check_target_module_exists(config, path):
            left_out.add(parts[-1])
    return [name for name in targets if name in left_out]


def _target_modules(target_model: TargetModel, targets: Sequence[str] | None) -> list[str]:
    """Return the names of the layers that get LoRA, see `LoraSpec.targets`."""
    model = target_model.model
    defaults = default_targets(model)
    if targets is None:
        return defaults
    names = linear_names(model)
    unknown = [name for name in targets if name not in names]
    if unknown:
        raise TargetModelError(
            f"lora_target_modules: {', '.join(unknown)}: no such layer; there are"
            f" {', '.join(names)}"
        )
    if LM_HEAD in targets and LM_HEAD not in defaults:
        raise TargetModelError(
            "lora_target_modules: lm_head is tied to the input embeddings, which merging would"
            " corrupt; leave lm_head out"
        )
    return list(targets)


def _check_modules(target_model: TargetModel, names: Sequence[str]) -> None:
    """Raise TargetModelError unless every name is the end of a module's path: PEFT silently ignores
    other names.
    """
    paths = [path for path, _ in target_model.model.named_modules()]
    unknown = [name for name in names if not any(path.endswith(name) for path in paths)]
    if unknown:
        raise TargetModelError(
            f"lora_modules_to_save: {', '.join(unknown)}: this target model has no module of that"
            " name"
        )


def _trainable_in_float32(peft: Any) -> Any:
    """Upcast all trainable parameters to float32: PEFT keeps `modules_to_save` in the target
    model's dtype.

    In half precision, an optimizer's small updates are lost to rounding.
    """
    for parameter in peft.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return peft
