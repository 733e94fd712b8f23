"""How a model's tokens are chosen: acceptance rule, sampling, and batch size."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from medusa_train.config.schema import EvalConfig
from medusa_train.inference.accept import AcceptanceRule, Greedy, Typical
from medusa_train.inference.sampling import Sampling


@dataclass(frozen=True)
class DecodingMode:
    """The acceptance rule of the tree, the sampling of its baselines, and the batch size.

    Attributes:
        acceptance: "greedy"; "sampling", which is lossless in distribution; or "typical", which is
            not.
        temperature: temperature of sampling and of typical acceptance.
        top_p, top_k: sampling restrictions, see `Sampling`.
        epsilon, delta: thresholds of typical acceptance, see `Typical`.
        batch_size: number of questions that are answered in the same passes.
        seed: random seed of sampling.
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
        return cls(
            acceptance=cfg.acceptance,
            temperature=cfg.temperature or 0.0,
            top_p=cfg.top_p,
            top_k=cfg.top_k or 0,
            epsilon=cfg.epsilon,
            delta=cfg.delta,
            batch_size=cfg.batch_size,
            seed=cfg.seed,
        )

    @property
    def rule(self) -> AcceptanceRule:
        """The rule by which the tree's nodes are accepted."""
        if self.acceptance == "typical":
            return Typical(self.temperature, self.epsilon, self.delta)
        return self.baseline_rule

    @property
    def baseline_rule(self) -> Greedy | Sampling:
        """How the baselines choose tokens: greedily, or by sampling at the same temperature."""
        if self.acceptance == "greedy":
            return Greedy()
        if self.acceptance == "typical":
            return Sampling(self.temperature)
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def generate_options(self) -> dict[str, Any]:
        """`baseline_rule` as options of transformers' `GenerationConfig`."""
        rule = self.baseline_rule
        if isinstance(rule, Greedy):
            return {"do_sample": False}
        return {
            "do_sample": True,
            "temperature": rule.temperature,
            "top_k": rule.top_k,
            "top_p": rule.top_p,
        }

    def seed_of(self, prompt: Sequence[int]) -> int:
        """Return the seed of an answer. It depends on the prompt, not on the answers before it."""
        prompt_bytes = array("q", prompt).tobytes()  # 8 bytes a token
        return zlib.crc32(prompt_bytes, self.seed & 0xFFFFFFFF)

    def generators(
        self, prompts: Sequence[Sequence[int]], rule: AcceptanceRule
    ) -> list[torch.Generator] | None:
        """Return a random generator for each prompt; None if `rule` draws no numbers."""
        if not isinstance(rule, Sampling):
            return None
        seeds = [self.seed_of(prompt) for prompt in prompts]
        return [torch.Generator().manual_seed(seed) for seed in seeds]

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
        """Name the report's directory: the benchmark, `drafting` (draft settings that differ from
        the run's) and the decoding settings that are not the default.
        """
        parts = [bench, *drafting]
        if self.acceptance != "greedy":
            parts += [self.acceptance, f"t{self.temperature:g}"]
            shown = {**self.as_json, "seed": self.seed}
            for name in ("top_p", "top_k", "epsilon", "delta", "seed"):
                default = getattr(DecodingMode, name)
                if shown.get(name, default) != default:
                    parts.append(f"{name}{shown[name]}")
        if self.batch_size > 1:
            parts.append(f"batch{self.batch_size}")
        return "-".join(parts)


def mode_of(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoding mode that a report was measured with.

    Older reports have no entry; they were measured with greedy decoding.
    """
    return meta.get("decoding") or DecodingMode().as_json


def describe_mode(mode: Mapping[str, Any]) -> str:
    """Describe `DecodingMode.as_json` in words."""
    acceptance = mode["acceptance"]
    if acceptance == "greedy":
        parts = ["greedy decoding"]
    elif acceptance == "typical":
        thresholds = f"epsilon {mode['epsilon']:g}, delta {mode['delta']:g}"
        parts = [f"typical acceptance at temperature {mode['temperature']:g} ({thresholds})"]
    else:
        parts = [f"sampling at temperature {mode['temperature']:g}"]
        if mode["top_p"] < 1:
            parts.append(f"top-p {mode['top_p']:g}")
        if mode["top_k"]:
            parts.append(f"top-k {mode['top_k']}")
    if mode["batch_size"] > 1:
        parts.append(f"in batches of {mode['batch_size']}")
    return ", ".join(parts)
