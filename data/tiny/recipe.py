"""What a training run of the tiny backbone is made of: sizes, rates, their schedule. Knows no data and no weights."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig
from vocabulary import BOS, EOS, PAD_ID, SPECIAL


@dataclass(frozen=True)
class Recipe:
    """What a training run is made of; all of it is written to the model's README."""

    steps: int
    hidden: int = 384
    layers: int = 6
    head_dim: int = 64
    intermediate: int = 1024
    vocabulary: int = 2048
    micro_batch: int = 4096  # tokens, padding included
    accumulation: int = 2
    muon_lr: float = 0.02
    muon_decay: float = 0.1
    adam_lr: float = 3e-3
    warmup: int = 40
    flat: float = 0.4  # share of the steps before the learning rate falls linearly ...
    polish_rate: float = 0.1  # ... to this share of its peak; the second half of the polishing rounds takes it to zero
    polish_rounds: int = 40
    polish_requests: int = 36  # answered in each round
    embedding_dropout: float = 0.1
    question_weight: float = 1.0  # of the loss on what users write ...
    answers_only_from: float = 0.75  # ... until this share of the steps; 0 afterwards
    brief_steps: int = 120  # the last of the steps, which read problems and brief functions only
    lookahead_weight: float = 0.25  # of the loss on the tokens after the next one (lookahead.py) ...
    lookahead_from: float = 0.5  # ... from this share of the steps on
    seed: int = 0

    def config(self) -> LlamaConfig:
        """The model's Hugging Face configuration."""
        heads = self.hidden // self.head_dim
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 3),
            head_dim=self.head_dim,
            max_position_embeddings=4096,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=False,
            bos_token_id=SPECIAL.index(BOS),
            eos_token_id=SPECIAL.index(EOS),
            pad_token_id=PAD_ID,
        )

    def rate(self, step: int) -> float:
        """The learning rate's factor at a step: warm-up, flat, down to `polish_rate`; 0 at the end."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if step >= self.steps:
            left = self.steps + self.polish_rounds - step
            return self.polish_rate * min(1.0, 2 * left / self.polish_rounds)
        fallen = max(0.0, step / self.steps - self.flat) / (1 - self.flat)
        return 1 - fallen * (1 - self.polish_rate)
