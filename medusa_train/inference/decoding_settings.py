"""How a model decodes: with what (dtype, device, compilation), and by which rule, sampling and
batches.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from medusa_train.config.schema import EvalConfig
from medusa_train.errors import CheckpointError
from medusa_train.inference.accept import Rule, Typical
from medusa_train.inference.sampling import Sampling
from medusa_train.models.backbone import Backbone
from medusa_train.models.loading import quantization_of
from medusa_train.models.precision import device_name

_KEY = "form"  # of tree.json


@dataclass(frozen=True)
class DecodingSettings:
    """With what a backbone decodes, as tree.json records it: latencies and the best tree depend on
    it.

    Attributes:
        dtype: of the weights, or of the matrix products of a quantized backbone.
        quantization: "nf4", "int8" or another method's name; None: weights in `dtype`.
        merged: False with an adapter beside the weights; merged into them it costs nothing.
        compiled: whether passes of a single row are compiled by torch.compile. graphs: whether
            steps are CUDA graphs.
        device: "cpu" or "cuda". device_name: of the processor or GPU.
        threads: that torch uses on a CPU; None on a GPU.
        gpu_kernels: of the key, joined by "+"; None: none.
    """

    dtype: str
    quantization: str | None
    merged: bool
    compiled: bool
    device: str
    device_name: str
    threads: int | None
    graphs: bool = False
    gpu_kernels: str | None = None

    @classmethod
    def of(cls, backbone: Backbone) -> DecodingSettings:
        """Return the settings of a loaded backbone."""
        return cls(
            dtype=str(backbone.dtype).removeprefix("torch."),
            quantization=quantization_of(backbone.model),
            merged=not any(".lora_A." in name for name, _ in backbone.model.named_parameters()),
            compiled=backbone.compiled is not None and backbone.compiled.covers(1, 1),
            device=backbone.device.type,
            device_name=device_name(backbone.device),
            threads=torch.get_num_threads() if backbone.device.type == "cpu" else None,
            graphs=getattr(backbone.step_runner, "works", backbone.step_runner is not None),
            gpu_kernels="+".join(backbone.gpu_kernels) or None,
        )

    @classmethod
    def load(cls, path: Path) -> DecodingSettings | None:
        """Return the settings that a tree file records, None without any; CheckpointError if it
        cannot be read.
        """
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not a tree file ({error})") from error
        settings = record.get(_KEY) if isinstance(record, dict) else None
        names = [one.name for one in fields(cls)]
        newer = {"graphs", "gpu_kernels"}
        if not isinstance(settings, dict) or not set(names) - newer <= set(settings):
            return None
        # before there was "graphs", graphs and compilation went together
        graphs = settings["compiled"] and settings["device"] == "cuda"
        settings = {"graphs": graphs, "gpu_kernels": None, **settings}
        return cls(**{name: settings[name] for name in names})

    def record(self) -> dict[str, Any]:
        """Return the entry of tree.json."""
        return {_KEY: asdict(self)}

    def differences(self, fitted: DecodingSettings) -> list[str]:
        """Name the fields in which a tree's settings differ from these: "dtype bfloat16, now
        float32".
        """
        return [
            f"{name.replace('_', ' ')} {_text(value)}, now {_text(getattr(self, name))}"
            for name, value in asdict(fitted).items()
            if value != getattr(self, name)
        ]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


@dataclass(frozen=True)
class DecodingMode:
    """The acceptance rule of the tree, the sampling of its baselines, and the size of batches.

    Attributes:
        acceptance: "greedy"; "sampling", which is lossless in distribution; or "typical", which is
        not. temperature, top_p, top_k: of sampling; the temperature of typical acceptance, too.
        epsilon, delta: of typical acceptance, see `Typical`.
        batch_size: questions that are answered in the same passes.
        seed: of sampling.
    """

    acceptance: Literal["greedy", "sampling", "typical"] = "greedy"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    epsilon: float = Typical.epsilon
    delta: float = Typical.delta
    batch_size: int = 1
    seed: int = 42

    @classmethod
    def from_config(cls, cfg: EvalConfig) -> DecodingMode:
        """Return the mode that the keys describe."""
        cfg = cfg.resolved()
        sampling = (cfg.temperature or 0.0, cfg.top_p, cfg.top_k or 0)
        return cls(cfg.acceptance, *sampling, cfg.epsilon, cfg.delta, cfg.batch_size, cfg.seed)

    @property
    def rule(self) -> Rule:
        """The rule by which the tree's nodes are accepted."""
        if self.acceptance == "typical":
            return Typical(self.temperature, self.epsilon, self.delta)
        return self.baseline_rule

    @property
    def baseline_rule(self) -> Sampling | None:
        """How the baselines choose tokens: greedily, or by sampling at the same temperature."""
        if self.acceptance == "greedy":
            return None
        if self.acceptance == "typical":
            return Sampling(self.temperature)
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def generate_options(self) -> dict[str, Any]:
        """The same as options of transformers' `GenerationConfig`."""
        rule = self.baseline_rule
        if rule is None:
            return {"do_sample": False}
        return {
            "do_sample": True,
            "temperature": rule.temperature,
            "top_k": rule.top_k,
            "top_p": rule.top_p,
        }

    def seed_of(self, prompt: Sequence[int]) -> int:
        """Return the seed of an answer, which depends on its prompt and not on the answers before
        it.
        """
        return zlib.crc32(array("q", prompt).tobytes(), self.seed & 0xFFFFFFFF)

    def generators(
        self, prompts: Sequence[Sequence[int]], rule: Rule
    ) -> list[torch.Generator] | None:
        """Return a random generator for each prompt; None if `rule` draws no numbers."""
        if not isinstance(rule, Sampling):
            return None
        return [torch.Generator().manual_seed(self.seed_of(prompt)) for prompt in prompts]

    @property
    def as_json(self) -> dict[str, Any]:
        """The settings that have an effect, as plain JSON values for the report."""
        values: dict[str, Any] = {"acceptance": self.acceptance}
        if self.acceptance != "greedy":
            values["temperature"] = self.temperature
        if self.acceptance == "sampling":
            values |= {"top_p": self.top_p, "top_k": self.top_k}
        if self.acceptance == "typical":
            values |= {"epsilon": self.epsilon, "delta": self.delta}
        return {**values, "batch_size": self.batch_size}

    def directory_name(self, bench: str, *drafting: str) -> str:
        """Name the report's directory: the bench, what is not the default, and `drafting`: what is
        not the run's.
        """
        parts = [bench, *drafting]
        if self.acceptance != "greedy":
            parts += [self.acceptance, f"t{self.temperature:g}"]
            shown = {**self.as_json, "seed": self.seed}
            parts += [
                f"{name}{shown[name]}"
                for name in ("top_p", "top_k", "epsilon", "delta", "seed")
                if name in shown and shown[name] != getattr(DecodingMode, name)
            ]
        return "-".join(parts) + (f"-batch{self.batch_size}" if self.batch_size > 1 else "")


def mode_of(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoding mode that a report was measured with; older reports are of greedy
    decoding.
    """
    return meta.get("decoding") or DecodingMode().as_json


def describe_mode(mode: Mapping[str, Any]) -> str:
    """Describe `DecodingMode.as_json` in words."""
    if mode["acceptance"] == "greedy":
        text = "greedy decoding"
    elif mode["acceptance"] == "typical":
        text = (
            f"typical acceptance at temperature {mode['temperature']:g} (epsilon"
            f" {mode['epsilon']:g}, delta {mode['delta']:g})"
        )
    else:
        text = f"sampling at temperature {mode['temperature']:g}"
        text += f", top-p {mode['top_p']:g}" if mode["top_p"] < 1 else ""
        text += f", top-k {mode['top_k']}" if mode["top_k"] else ""
    return text + (f", in batches of {mode['batch_size']}" if mode["batch_size"] > 1 else "")
