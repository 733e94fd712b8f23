"""Train the tiny test model on text: recipe, model, losses, multi-token prediction, optimizers, the
saved model.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from chats import BOS_ID, EOS_ID, PAD_ID, EncodedChat, micro_batches, stream_batches, to_tensors
from corpus import Corpus
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Recipe:
    """Sizes, rates and schedule; the defaults are those of the shipped model."""

    steps: int = 2720  # on text, of about 7,500 tokens each
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
    warmup: int = 40  # steps
    flat: float = 0.4  # share of the steps at the peak learning rate; it then falls linearly ...
    # ... to this share of the peak, at which the unlikelihood rounds begin
    unlikelihood_rate: float = 0.1
    unlikelihood_rounds: int = 40  # the learning rate falls to zero in their second half
    unlikelihood_requests: int = 36  # a round
    embedding_dropout: float = 0.1
    question_weight: float = 1.0  # loss weight of user messages ...
    answers_only_from: float = 0.75  # ... up to this share of the steps; 0 afterwards
    brief_steps: int = 120  # last steps, on problems and brief functions only
    lookahead_weight: float = 0.25  # loss weight of multi-token prediction ...
    lookahead_from: float = 0.5  # ... from this share of the steps on
    seed: int = 0

    def model_config(self) -> LlamaConfig:
        """Return the model's Hugging Face configuration."""
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
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        )

    def lr_factor(self, step: int) -> float:
        """Return the factor of the peak learning rates at a step; unlikelihood rounds count on from
        `steps`.
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        if step >= self.steps:
            left = self.steps + self.unlikelihood_rounds - step
            return self.unlikelihood_rate * min(1.0, 2 * left / self.unlikelihood_rounds)
        progress = max(0.0, step / self.steps - self.flat) / (1 - self.flat)
        return 1 - progress * (1 - self.unlikelihood_rate)


class LookaheadHeads(nn.Module):
    """Heads for multi-token prediction, used in training only.

    Head k predicts the token k + 1 positions ahead from lm_head(h + SiLU(W_k h + b_k)), with W and
    b zero at first. This is the form of Medusa's heads. After Gloeckle et al. 2024, "Better &
    Faster Large Language Models via Multi-token Prediction".
    """

    COUNT = 4
    DECAY = 0.8  # head k has the loss weight DECAY**k
    SAMPLED = 2  # heads trained per micro-batch

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(self.COUNT))
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)

    def loss(
        self, hidden: Tensor, lm_head: nn.Module, ids: Tensor, weights: Tensor, rng: Random
    ) -> Tensor:
        """Return the summed weighted cross-entropy of SAMPLED heads, scaled to be unbiased for all
        of them.

        `hidden` [B, T-1, d] predicts ids[:, 1:], and `weights` [B, T-1] belongs to those tokens.
        Each head's loss has the weight of the token that it predicts.
        """
        total = hidden.new_zeros((), dtype=torch.float32)
        for k in rng.sample(range(1, self.COUNT + 1), self.SAMPLED):
            if ids.shape[1] <= k + 1:
                continue
            h = hidden[:, :-k]
            logits = lm_head(h + F.silu(self.blocks[k - 1](h))).float()
            losses = F.cross_entropy(
                logits.flatten(0, 1), ids[:, 1 + k :].flatten(), reduction="none"
            )
            total = total + self.DECAY**k * (losses * weights[:, k:].flatten()).sum()
        return total * (self.COUNT / self.SAMPLED)


def hidden_states(model: LlamaForCausalLM, ids: Tensor, dropout: float = 0.0) -> Tensor:
    """Return the last hidden states [B, T-1, d] that predict ids[:, 1:]; `dropout` acts on the
    embeddings.
    """
    embedded = model.model.embed_tokens(ids[:, :-1])
    if dropout:
        embedded = F.dropout(embedded, dropout)
    return model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state


def token_losses(model: LlamaForCausalLM, hidden: Tensor, ids: Tensor) -> Tensor:
    """Return the float32 cross-entropy [B, T-1] of each next token; `hidden` is [B, T-1, d]."""
    logits = model.lm_head(hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(
        ids.shape[0], -1
    )


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, chats: Sequence[EncodedChat], tokens: int) -> float:
    """Return the mean loss of assistant tokens in nats, in micro-batches of `tokens` tokens."""
    device = next(model.parameters()).device
    model.eval()
    total, count = 0.0, 0
    for batch in micro_batches(chats, tokens, None):
        ids, kinds = to_tensors(batch, device)
        with torch.autocast(device.type, torch.bfloat16):
            losses = token_losses(model, hidden_states(model, ids), ids)
        mask = kinds[:, 1:] == 2
        total += float(losses[mask].double().sum())
        count += int(mask.sum())
    model.train()
    return total / count


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    """Initialize a model; the projections that write into the residual stream start at zero."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(recipe.model_config())
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def build_optimizers(
    model: LlamaForCausalLM, lookahead: LookaheadHeads, recipe: Recipe
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW for everything else."""
    matrices, norms, embeddings = [], [], []
    for name, parameter in model.named_parameters():
        group = (
            embeddings
            if "embed" in name or "lm_head" in name
            else matrices
            if parameter.ndim == 2
            else norms
        )
        group.append(parameter)
    adam_groups = [
        {"params": embeddings, "weight_decay": 0.01},
        {"params": norms, "weight_decay": 0.0},
        {"params": list(lookahead.parameters()), "weight_decay": 0.01},
    ]
    return [
        torch.optim.Muon(
            matrices, lr=recipe.muon_lr, weight_decay=recipe.muon_decay, momentum=0.95
        ),
        torch.optim.AdamW(adam_groups, lr=recipe.adam_lr, betas=(0.9, 0.95)),
    ]


class TrainingRun:
    """A model in training with its optimizers and the number of steps taken."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device, self.step = recipe, device, 0
        self.model = build_model(recipe).to(device).train()
        self.lookahead = LookaheadHeads(recipe.hidden).to(device)
        self.optimizers = build_optimizers(self.model, self.lookahead, recipe)

    def update(self, batches: Sequence[Sequence[EncodedChat]]) -> float:
        """Take one optimizer step on micro-batches and return the next-token loss in nats per
        weighted token.
        """
        recipe = self.recipe
        lookahead_weight = (
            recipe.lookahead_weight if self.step >= recipe.lookahead_from * recipe.steps else 0.0
        )
        question_weight = (
            recipe.question_weight if self.step < recipe.answers_only_from * recipe.steps else 0.0
        )
        rng = Random(f"lookahead {recipe.seed} {self.step}")
        torch.manual_seed(recipe.seed * 1_000_003 + self.step)  # dropout
        loaded = [to_tensors(batch, self.device) for batch in batches]
        weight_of_kind = torch.tensor([0.0, question_weight, 1.0], device=self.device)
        weights = [weight_of_kind[kinds[:, 1:].long()] for _, kinds in loaded]
        total = sum(float(w.sum()) for w in weights)
        loss = 0.0
        for (ids, _), token_weights in zip(loaded, weights, strict=True):
            with torch.autocast(self.device.type, torch.bfloat16):
                hidden = hidden_states(self.model, ids, recipe.embedding_dropout)
                part = (token_losses(self.model, hidden, ids) * token_weights).sum() / total
                ahead = 0.0
                if lookahead_weight:
                    ahead = self.lookahead.loss(hidden, self.model.lm_head, ids, token_weights, rng)
            (part + lookahead_weight * ahead / total).backward()
            loss += float(part.detach())
        self.optimizer_step()
        return loss

    def optimizer_step(self) -> None:
        """Clip the gradients, step both optimizers at this step's learning rates, and count the
        step.
        """
        nn.utils.clip_grad_norm_([*self.model.parameters(), *self.lookahead.parameters()], 1.0)
        factor = self.recipe.lr_factor(self.step)
        for optimizer, peak in zip(
            self.optimizers, (self.recipe.muon_lr, self.recipe.adam_lr), strict=True
        ):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def train(self, corpus: Corpus) -> None:
        """Train for `recipe.steps` steps, the last `brief_steps` on `corpus.brief_epoch`."""
        recipe = self.recipe
        text = stream_batches(corpus.epoch, recipe.micro_batch, recipe.seed)
        brief = stream_batches(corpus.brief_epoch, recipe.micro_batch, recipe.seed)
        losses: list[float] = []
        start = time.monotonic()
        while self.step < recipe.steps:
            batches = text if self.step < recipe.steps - recipe.brief_steps else brief
            losses.append(self.update([next(batches) for _ in range(recipe.accumulation)]))
            if not math.isfinite(losses[-1]):
                raise SystemExit(
                    f"loss is {losses[-1]} at step {self.step}: lower the learning rates"
                )
            if self.step % 10 == 0:
                minutes = (time.monotonic() - start) / self.step * (recipe.steps - self.step) / 60
                print(
                    f"step {self.step}: loss {sum(losses[-10:]) / 10:.4f}, {minutes:.0f} min left",
                    flush=True,
                )

    def print_held_out_losses(self, corpus: Corpus) -> None:
        """Evaluate each kind of held-out document and print nats per assistant token."""
        for kind, chats in corpus.held_out_chats().items():
            if chats:
                loss = evaluate(self.model, chats, self.recipe.micro_batch)
                print(f"held-out {kind}: {loss:.3f} nats per answer token", flush=True)


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Write the model in bf16 with its configuration and a greedy generation configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads(model.config.to_json_string())
    config.update(
        architectures=["LlamaForCausalLM"], dtype="bfloat16", torch_dtype="bfloat16", use_cache=True
    )
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    GenerationConfig(
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        do_sample=False,
        max_new_tokens=256,
    ).save_pretrained(directory)
    weights = {
        k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    # safetensors writes files that only the owner can read
    (directory / "model.safetensors").chmod(0o644)
