"""A LoRA adapter on a backbone, and the teacher that remains when it is off; knows no draft and no loss."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medusa_train.errors import BackboneError, CheckpointError
from medusa_train.models.backbone import Backbone

HEAD = "lm_head"


@dataclass(frozen=True)
class LoraSpec:
    """What LoRA to put on a backbone.

    Attributes:
        r, alpha, dropout: as in LoRA; the branch is scaled by alpha / r.
        targets: names of linear layers (`q_proj`, `lm_head`, ...), or None for every linear layer, lm_head included.
        modules_to_save: modules trained whole beside the adapter.
    """

    r: int = 32
    alpha: int = 16
    dropout: float = 0.05
    targets: tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] = ()


def linear_names(model: Any) -> list[str]:
    """The last parts of the names of all linear layers, quantised ones too, lm_head last."""
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    head = model.get_output_embeddings()
    head_names = {name.rpartition(".")[2] for name, module in model.named_modules() if module is head}
    return [*sorted(names - head_names), *sorted(names & head_names)]


def _with_masters(peft: Any) -> Any:
    """`peft` with all that it trains in float32: whole modules (modules_to_save) come in the backbone's own dtype.

    In half precision an optimizer's small steps round to nothing.
    """
    for parameter in peft.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return peft


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """What peft wrote about the adapter in `directory`.

    Raises:
        CheckpointError: there is no adapter, or its description can't be read.
    """
    path = directory / "adapter_config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory}: holds no adapter (no adapter_config.json)")
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: is no JSON: {error}") from error
    return found


class Adapter:
    """A PEFT LoRA adapter inside a backbone's layers.

    The backbone's own model object stays in use; PEFT puts its layers into it. Draft heads live outside, or PEFT
    would freeze them and give them adapters as well.

    Attributes:
        backbone: whose layers carry the adapter. peft: the PeftModel around its model, for saving.
    """

    def __init__(self, backbone: Backbone, peft: Any) -> None:
        self.backbone = backbone
        self.peft = peft

    @classmethod
    def attach(cls, backbone: Backbone, spec: LoraSpec) -> Adapter:
        """Put fresh LoRA layers (B = 0: the backbone is unchanged) into `backbone`; float32, trainable.

        Raises:
            BackboneError: a target names no linear layer, or is an lm_head that shares its matrix with the
                embeddings (merging would corrupt them).
        """
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=spec.r,
            lora_alpha=spec.alpha,
            lora_dropout=spec.dropout,
            target_modules=_checked_targets(backbone, spec.targets),
            modules_to_save=list(spec.modules_to_save) or None,
            task_type="CAUSAL_LM",
        )
        return cls(backbone, _with_masters(get_peft_model(backbone.model, config)))

    @classmethod
    def load(cls, backbone: Backbone, directory: Path, *, trainable: bool = False) -> Adapter:
        """Put the adapter saved in `directory` into `backbone`.

        Raises:
            CheckpointError: there is no adapter, or it is made for another backbone.
        """
        from peft import PeftModel

        read_adapter_config(directory)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the backbone lies elsewhere now than when it was trained
                peft = PeftModel.from_pretrained(
                    backbone.model, directory, is_trainable=trainable, use_safetensors=True, local_files_only=True
                )
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{directory}: this adapter can't be put on {backbone.name}: {error}") from error
        adapter = cls(backbone, _with_masters(peft))
        backbone.model.eval()
        return adapter

    def save(self, directory: Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors, without the backbone's own matrices."""
        self.peft.save_pretrained(directory, safe_serialization=True, save_embedding_layers=False)

    def parameters(self) -> list[nn.Parameter]:
        """What the adapter trains."""
        return [parameter for parameter in self.peft.parameters() if parameter.requires_grad]

    @contextmanager
    def teacher(self) -> Iterator[None]:
        """Within: the backbone as it was, adapter and dropout off, no graph. Over 4 bits, the 4-bit backbone."""
        model = self.backbone.model
        training = model.training
        wanted = {parameter: parameter.requires_grad for parameter in model.parameters()}
        model.eval()
        try:
            with torch.no_grad(), self.peft.disable_adapter():
                yield
        finally:
            model.train(training)
            for parameter, flag in wanted.items():  # PEFT makes adapters trainable on leaving, frozen ones too
                parameter.requires_grad_(flag)

    def merge(self) -> None:
        """Fold the adapter into the backbone's matrices; a quantised backbone is dequantised first.

        Folding into 4 bits would round the merged weights once more, and the original full-precision backbone with
        this adapter is not the model that was trained.
        """
        if getattr(self.backbone.model, "is_quantized", False):
            self._move_onto_dequantized()
        self.backbone.model = self.peft.merge_and_unload()
        self.backbone.model.eval().requires_grad_(False)

    def _move_onto_dequantized(self) -> None:
        from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

        config = self.peft.peft_config["default"]
        weights = get_peft_model_state_dict(self.peft, save_embedding_layers=False)
        plain = self.peft.unload().dequantize()
        self.peft = get_peft_model(plain, config)
        set_peft_model_state_dict(self.peft, weights)


def _checked_targets(backbone: Backbone, targets: Sequence[str] | None) -> list[str]:
    known = linear_names(backbone.model)
    model = backbone.model
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if targets is None:
        return [name for name in known if not (tied and name == HEAD)]
    if unknown := [name for name in targets if name not in known]:
        raise BackboneError(
            f"lora_target_modules: {', '.join(unknown)}: no such linear layer; this backbone has {', '.join(known)}"
        )
    if tied and HEAD in targets:
        raise BackboneError(
            "lora_target_modules: lm_head shares its matrix with the input embeddings here, which merging would "
            "corrupt; leave lm_head out"
        )
    return list(targets)
