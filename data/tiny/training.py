"""Training the tiny backbone: batches, two optimizers, one schedule, and checkpoints that a later run goes on from.

Knows nothing of where the text comes from: an epoch is a function from its number to encoded chats.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from lookahead import Lookahead
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from vocabulary import BOS, EOS, PAD, SPECIAL, Encoded

PAD_ID = SPECIAL.index(PAD)
Epoch = Callable[[int], Sequence[Encoded]]


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


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    """A freshly initialised model; what writes into the residual stream starts at zero."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(recipe.config())
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def build_optimizers(model: LlamaForCausalLM, lookahead: Lookahead, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, unembedding, norms and lookahead blocks."""
    matrices, norms, tables = [], [], []
    for name, parameter in model.named_parameters():
        group = tables if "embed" in name or "lm_head" in name else matrices if parameter.ndim == 2 else norms
        group.append(parameter)
    assert len(matrices) == 7 * recipe.layers, "every matrix inside a layer goes to Muon"
    return [
        torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=recipe.muon_decay, momentum=0.95),
        torch.optim.AdamW(
            [
                {"params": tables, "weight_decay": 0.01},
                {"params": norms, "weight_decay": 0.0},
                {"params": list(lookahead.parameters()), "weight_decay": 0.01},
            ],
            lr=recipe.adam_lr,
            betas=(0.9, 0.95),
        ),
    ]


def micro_batches(chats: Sequence[Encoded], tokens: int, rng: Random | None) -> list[list[Encoded]]:
    """Chats of similar length together, at most `tokens` padded tokens each; shuffled where `rng` is given."""
    noise = {id(chat): rng.random() * 0.1 if rng else 0.0 for chat in chats}
    order = sorted(chats, key=lambda chat: len(chat.ids) * (1 + noise[id(chat)]))
    batches: list[list[Encoded]] = []
    longest = 0
    for chat in order:
        longest = max(longest, len(chat.ids))
        if not batches or longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            longest = len(chat.ids)
        batches[-1].append(chat)
    if rng:
        rng.shuffle(batches)
    return batches


def to_tensors(chats: Sequence[Encoded], device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids [B, T], kinds [B, T]): kind 0 = padding, 1 = not written by the assistant, 2 = assistant.

    Rows are padded on the right, so a causal model needs no attention mask.
    """
    width = max(len(chat.ids) for chat in chats)
    ids = torch.full((len(chats), width), PAD_ID)
    kinds = torch.zeros((len(chats), width), dtype=torch.int8)
    for row, chat in enumerate(chats):
        ids[row, : len(chat.ids)] = torch.tensor(chat.ids)
        kinds[row, : len(chat.ids)] = 1 + torch.tensor(chat.assistant, dtype=torch.int8)
    return ids.to(device), kinds.to(device)


def hidden_states(model: LlamaForCausalLM, ids: Tensor, dropout: float = 0.0) -> Tensor:
    """The last hidden states [B, T-1, d] that predict ids[:, 1:]; `dropout` acts on the embeddings."""
    embedded = model.model.embed_tokens(ids[:, :-1])
    if dropout:
        embedded = F.dropout(embedded, dropout)
    return model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state


def token_losses(model: LlamaForCausalLM, hidden: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy [B, T-1] in nats of each next token, float32; `hidden` is [B, T-1, d]."""
    logits = model.lm_head(hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(ids.shape[0], -1)


@torch.no_grad()
def held_out_losses(model: LlamaForCausalLM, chats: Sequence[Encoded], tokens: int) -> dict[str, float]:
    """Mean loss in nats per token over all tokens (`all`) and over the assistant's, eos included (`assistant`).

    The forward pass runs under bf16 autocast, the loss in float32; the sums are float64.
    """
    device = next(model.parameters()).device
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    counts = torch.zeros(2, dtype=torch.float64)
    for batch in micro_batches(chats, tokens, None):
        ids, kinds = to_tensors(batch, device)
        with torch.autocast(device.type, torch.bfloat16):
            losses = token_losses(model, hidden_states(model, ids), ids).double().cpu()
        for slot, chosen in enumerate((kinds[:, 1:].cpu() > 0, kinds[:, 1:].cpu() == 2)):
            sums[slot] += losses[chosen].sum()
            counts[slot] += chosen.sum()
    model.train()
    mean = sums / counts
    return {"all": float(mean[0]), "assistant": float(mean[1])}


def stream(epoch: Epoch, recipe: Recipe) -> Iterator[tuple[int, list[Encoded]]]:
    """(epoch number, micro-batch) for ever; the same for the same seed, wherever training starts."""
    number = 0
    while True:
        rng = Random(f"batches {recipe.seed} {number}")
        for batch in micro_batches(epoch(number), recipe.micro_batch, rng):
            yield number, batch
        number += 1


class Run:
    """A training run: model, optimizers, step. Goes on from `checkpoint` where that exists."""

    def __init__(self, recipe: Recipe, checkpoint: Path, device: torch.device) -> None:
        self.recipe, self.checkpoint, self.device = recipe, checkpoint, device
        self.model = build_model(recipe).to(device).train()
        self.lookahead = Lookahead(recipe.hidden).to(device)
        self.optimizers = build_optimizers(self.model, self.lookahead, recipe)
        self.step = 0
        self.kept: dict[str, dict[str, Tensor]] = {}  # named copies of the weights, saved with the rest
        if checkpoint.exists():
            self._load()

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"lookahead.{name}": value for name, value in self.lookahead.state_dict().items()}
        for label, weights in self.kept.items():
            tensors |= {f"kept.{label}.{name}": value for name, value in weights.items()}
        for number, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{index}.{key}": value for key, value in state.items()}
        return tensors

    def save(self) -> None:
        """Write weights, optimizer state and step, atomically."""
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        save_file({k: v.contiguous() for k, v in self._tensors().items()}, partial, {"step": str(self.step)})
        os.replace(partial, self.checkpoint)

    def _load(self) -> None:
        with safe_open(self.checkpoint, "pt") as file:
            self.step = int(file.metadata()["step"])
        tensors = load_file(self.checkpoint, device=str(self.device))
        for prefix, module in (("model.", self.model), ("lookahead.", self.lookahead)):
            weights = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            if weights:  # a checkpoint from before the lookahead began need not hold it
                module.load_state_dict(weights)
        for key, value in tensors.items():
            if key.startswith("kept."):
                _, label, name = key.split(".", 2)
                self.kept.setdefault(label, {})[name] = value
        for number, optimizer in enumerate(self.optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            for key, value in tensors.items():
                if key.startswith(f"optimizer.{number}."):
                    _, _, index, name = key.split(".", 3)
                    state.setdefault(int(index), {})[name] = value
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def update(self, batches: Sequence[Sequence[Encoded]]) -> tuple[float, int]:
        """One optimizer step over micro-batches: (next-token loss in nats per counted token, tokens read)."""
        recipe = self.recipe
        ahead = recipe.lookahead_weight if self.step >= recipe.lookahead_from * recipe.steps else 0.0
        rng = Random(f"lookahead {recipe.seed} {self.step}")
        torch.manual_seed(recipe.seed * 1_000_003 + self.step)  # dropout is the same after a resume
        weight = recipe.question_weight if self.step < recipe.answers_only_from * recipe.steps else 0.0
        loaded = [to_tensors(batch, self.device) for batch in batches]
        by_kind = torch.tensor([0.0, weight, 1.0], device=self.device)
        weights = [by_kind[kinds[:, 1:].long()] for _, kinds in loaded]
        total = sum(float(w.sum()) for w in weights)
        loss = 0.0
        for (ids, _), weighting in zip(loaded, weights, strict=True):
            with torch.autocast(self.device.type, torch.bfloat16):
                hidden = hidden_states(self.model, ids, recipe.embedding_dropout)
                part = (token_losses(self.model, hidden, ids) * weighting).sum() / total
                further = self.lookahead.losses(hidden, self.model.lm_head, ids, weighting, rng) if ahead else 0.0
            (part + ahead * further / total).backward()
            loss += float(part.detach())
        self.apply(recipe.rate(self.step))
        self.step += 1
        return loss, sum(len(chat.ids) for batch in batches for chat in batch)

    def keep(self, label: str, share: float = 1.0) -> None:
        """Move the copy of the weights called `label` towards the weights by `share`; 1 makes it anew."""
        weights = self.model.state_dict()
        if share == 1.0:
            self.kept[label] = {name: value.detach().clone() for name, value in weights.items()}
        else:
            for name, value in self.kept[label].items():
                value.lerp_(weights[name].detach(), share)

    def apply(self, rate: float) -> None:
        """Clip the gradients, step both optimizers at `rate` times their learning rates, clear the gradients."""
        nn.utils.clip_grad_norm_([*self.model.parameters(), *self.lookahead.parameters()], 1.0)
        peaks = (self.recipe.muon_lr, self.recipe.adam_lr)
        for optimizer, peak in zip(self.optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def train(
        self,
        epoch: Epoch,
        brief_epoch: Epoch,
        held_out: dict[str, Sequence[Encoded]],
        log: Callable[[dict[str, object]], None],
        every: int,
        on_checkpoint: Callable[[LlamaForCausalLM], None],
    ) -> None:
        """Train to `recipe.steps`, the last of them on `brief_epoch`.

        Every `every` steps, and at the end, evaluate, save, call `on_checkpoint`.
        """
        recipe = self.recipe
        turn = max(0, recipe.steps - recipe.brief_steps)  # the step from which on brief documents are read
        ordinary, brief = stream(epoch, recipe), stream(brief_epoch, recipe)
        for _ in range(min(self.step, turn) * recipe.accumulation):
            next(ordinary)
        for _ in range(max(0, self.step - turn) * recipe.accumulation):
            next(brief)
        losses: list[float] = []
        tokens, began, first = 0, time.monotonic(), self.step
        while self.step < recipe.steps:
            batches = ordinary if self.step < turn else brief
            drawn = [next(batches) for _ in range(recipe.accumulation)]
            loss, read = self.update([batch for _, batch in drawn])
            losses.append(loss)
            tokens += read
            if not math.isfinite(loss):
                raise SystemExit(f"the loss is {loss} at step {self.step}: lower the learning rates")
            last = self.step == recipe.steps
            if self.step % 10 == 0 or self.step % every == 0 or last:
                pace = (time.monotonic() - began) / (self.step - first)
                entry: dict[str, object] = {
                    "step": self.step,
                    "epoch": drawn[0][0],
                    "loss": round(sum(losses) / len(losses), 4),
                    "lr": round(recipe.rate(self.step - 1), 4),
                    "tokens_per_s": round(tokens / (time.monotonic() - began)),
                    "eta_min": round(pace * (recipe.steps - self.step) / 60, 1),
                }
                losses = []
                if self.step % every == 0 or last:
                    entry["held_out"] = {
                        kind: held_out_losses(self.model, chats, recipe.micro_batch) for kind, chats in held_out.items()
                    }
                    self.save()
                    on_checkpoint(self.model)
                log(entry)


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Write the model in bf16 with its configuration and a greedy generation configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads(model.config.to_json_string())
    config.update(architectures=["LlamaForCausalLM"], dtype="bfloat16", torch_dtype="bfloat16", use_cache=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    GenerationConfig(
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(EOS),
        pad_token_id=PAD_ID,
        do_sample=False,
        max_new_tokens=256,
    ).save_pretrained(directory)
    weights = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    partial = directory / "model.safetensors.partial"
    save_file(weights, partial, {"format": "pt"})
    partial.chmod(0o644)  # safetensors writes for the owner alone
    os.replace(partial, directory / "model.safetensors")
