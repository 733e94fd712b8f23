"""Describe how a model decodes (dtype, device, compilation, ...): step latencies and the best tree depend on it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from medusa_train.errors import CheckpointError
from medusa_train.models.backbone import Backbone
from medusa_train.models.loading import quantization_of
from medusa_train.models.precision import device_name

_KEY = "form"


@dataclass(frozen=True)
class DecodingForm:
    """The form in which a backbone decodes, as tree.json records it.

    Attributes:
        dtype: of the weights, or of the matrix products of a quantized backbone.
        quantization: "nf4", "int8" or another method's name; None: weights in `dtype`.
        merged: False with an adapter beside the weights; merged into them it costs nothing.
        compiled: whether passes of a single row are compiled by torch.compile, or captured as CUDA graphs.
        device: "cpu" or "cuda". device_name: of the processor or GPU.
        threads: that torch uses on a CPU; None on a GPU.
    """

    dtype: str
    quantization: str | None
    merged: bool
    compiled: bool
    device: str
    device_name: str
    threads: int | None

    @classmethod
    def of(cls, backbone: Backbone) -> DecodingForm:
        """Return the form of a loaded backbone."""
        return cls(
            dtype=str(backbone.dtype).removeprefix("torch."),
            quantization=quantization_of(backbone.model),
            merged=not any(".lora_A." in name for name, _ in backbone.model.named_parameters()),
            compiled=backbone.step_runner is not None
            or (backbone.compiled is not None and backbone.compiled.covers(1, 1)),
            device=backbone.device.type,
            device_name=device_name(backbone.device),
            threads=torch.get_num_threads() if backbone.device.type == "cpu" else None,
        )

    @classmethod
    def load(cls, path: Path) -> DecodingForm | None:
        """Return the form that a tree file records; None if it records none.

        Raises:
            CheckpointError: the file cannot be read.
        """
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not a tree file ({error})") from error
        form = record.get(_KEY) if isinstance(record, dict) else None
        names = [one.name for one in fields(cls)]
        if not isinstance(form, dict) or not set(names) <= set(form):
            return None
        return cls(**{name: form[name] for name in names})

    def record(self) -> dict[str, Any]:
        """Return the entry of tree.json."""
        return {_KEY: asdict(self)}

    def differences(self, fitted: DecodingForm) -> list[str]:
        """Name the fields in which a tree's form differs from this one: "dtype bfloat16, now float32"."""
        return [
            f"{name.replace('_', ' ')} {_text(value)}, now {_text(getattr(self, name))}"
            for name, value in asdict(fitted).items()
            if value != getattr(self, name)
        ]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
