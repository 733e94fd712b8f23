"""The decoding setup that tree.json records: dtype, quantization, compilation and device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from medusa_train.errors import CheckpointError
from medusa_train.io import parse_json
from medusa_train.models.loading import loaded_quantization
from medusa_train.models.precision import device_name
from medusa_train.models.target_model import TargetModel

#: Key of the settings in tree.json.
_KEY = "form"


@dataclass(frozen=True)
class DecodingSettings:
    """The decoding setup of a target model, as tree.json records it. Latencies and the best tree
    depend on it.

    Attributes:
        dtype: dtype of the weights; for a quantized target model, of its matrix products.
        quantization: "nf4", "int8" or another method's name; None: weights in `dtype`.
        merged: False if an adapter is separate from the weights. A merged adapter costs nothing.
        compiled: whether passes of a single row are compiled by torch.compile.
        device: "cpu" or "cuda".
        device_name: name of the processor or GPU.
        threads: number of threads that torch uses on a CPU; None on a GPU.
        graphs: whether steps are CUDA graphs.
    """

    dtype: str
    quantization: str | None
    merged: bool
    compiled: bool
    device: str
    device_name: str
    threads: int | None
    graphs: bool = False

    @classmethod
    def of(cls, target_model: TargetModel) -> DecodingSettings:
        """Return the settings of a loaded target model."""
        device = target_model.device
        has_adapter = any(".lora_A." in name for name, _ in target_model.model.named_parameters())
        runner = target_model.step_runner
        threads: int | None = None
        if device.type == "cpu":
            threads = torch.get_num_threads()
        return cls(
            dtype=str(target_model.dtype).removeprefix("torch."),
            quantization=loaded_quantization(target_model.model),
            merged=not has_adapter,
            compiled=target_model.compiled is not None and target_model.compiled.covers(1, 1),
            device=device.type,
            device_name=device_name(device),
            threads=threads,
            graphs=getattr(runner, "works", runner is not None),
        )

    @classmethod
    def load(cls, path: Path) -> DecodingSettings | None:
        """Return the settings that a tree file records; None if it records none.

        Raises:
            CheckpointError: the file cannot be read.
        """
        try:
            record = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not a tree file ({error})") from error
        settings = record.get(_KEY) if isinstance(record, dict) else None
        if not isinstance(settings, dict):
            return None
        names = [field.name for field in fields(cls)]
        for name in names:
            if name not in settings and name != "graphs":
                return None
        # files without "graphs" are from when a compiled model on a GPU always used graphs
        graphs = settings["compiled"] and settings["device"] == "cuda"
        settings = {"graphs": graphs, **settings}
        return cls(**{name: settings[name] for name in names})

    def record(self) -> dict[str, Any]:
        """Return the entry of tree.json."""
        return {_KEY: asdict(self)}

    def differences(self, fitted: DecodingSettings) -> list[str]:
        """List the fields in which a tree's settings, `fitted`, differ from these, for example
        "dtype bfloat16, now float32".
        """
        differences: list[str] = []
        for name, value in asdict(fitted).items():
            now = getattr(self, name)
            if value != now:
                differences.append(f"{name.replace('_', ' ')} {_text(value)}, now {_text(now)}")
        return differences


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
