"""How an evaluation decodes: greedily, by sampling or by typical acceptance, one question at a time or in batches."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from medusa_train.config.schema import EvalConfig
from medusa_train.inference.accept import Rule, Typical
from medusa_train.inference.sampling import Sampling


@dataclass(frozen=True)
class DecodingMode:
    """The acceptance rule of the tree, the sampling of its baselines, and the size of batches.

    Attributes:
        acceptance: "greedy"; "sampling", which is lossless in distribution; or "typical", which is not.
        temperature, top_p, top_k: of sampling; the temperature of typical acceptance, too.
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
        return cls(
            cfg.acceptance,
            cfg.temperature or 0.0,
            cfg.top_p,
            cfg.top_k or 0,
            cfg.epsilon,
            cfg.delta,
            cfg.batch_size,
            cfg.seed,
        )

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
        return {"do_sample": True, "temperature": rule.temperature, "top_k": rule.top_k, "top_p": rule.top_p}

    def seed_of(self, prompt: Sequence[int]) -> int:
        """Return the seed of an answer, which depends on its prompt and not on the answers before it."""
        return zlib.crc32(array("q", prompt).tobytes(), self.seed & 0xFFFFFFFF)

    def generators(self, prompts: Sequence[Sequence[int]], rule: Rule) -> list[torch.Generator] | None:
        """Return a random generator for each prompt; None if `rule` draws no numbers."""
        if not isinstance(rule, Sampling):
            return None
        return [torch.Generator().manual_seed(self.seed_of(prompt)) for prompt in prompts]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that have an effect, as plain JSON values for the report."""
        values: dict[str, Any] = {"acceptance": self.acceptance}
        if self.acceptance != "greedy":
            values["temperature"] = self.temperature
        if self.acceptance == "sampling":
            values |= {"top_p": self.top_p, "top_k": self.top_k}
        if self.acceptance == "typical":
            values |= {"epsilon": self.epsilon, "delta": self.delta}
        return {**values, "batch_size": self.batch_size}

    def directory_name(self, bench: str, draft: str | None = None, *, dynamic: bool = False) -> str:
        """Return the name of the report's directory: the bench, and what is not the default.

        Args:
            draft: a draft without training; None: the run's heads.
            dynamic: whether trees are dynamic.
        """
        bench = (bench if draft is None else f"{bench}-{draft}") + ("-dynamic" if dynamic else "")
        mode = "" if self.acceptance == "greedy" else f"-{self.acceptance}-t{self.temperature:g}"
        return bench + mode + (f"-batch{self.batch_size}" if self.batch_size > 1 else "")


def settings_of(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings that a report was measured with; older reports are of greedy decoding."""
    return meta.get("decoding") or DecodingMode().settings


def describe_settings(settings: Mapping[str, Any]) -> str:
    """Describe `DecodingMode.settings` in words."""
    if settings["acceptance"] == "greedy":
        text = "greedy decoding"
    elif settings["acceptance"] == "typical":
        text = (
            f"typical acceptance at temperature {settings['temperature']:g} (epsilon {settings['epsilon']:g}, "
            f"delta {settings['delta']:g})"
        )
    else:
        text = f"sampling at temperature {settings['temperature']:g}"
        text += f", top-p {settings['top_p']:g}" if settings["top_p"] < 1 else ""
        text += f", top-k {settings['top_k']}" if settings["top_k"] else ""
    return text + (f", in batches of {settings['batch_size']}" if settings["batch_size"] > 1 else "")
