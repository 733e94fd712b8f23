"""The models that `decode.py` times: shapes, what they take in memory, how they are made ready. Times nothing."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from decode_case import LOOP_TOKENS
from decode_floor import Sizes
from random_llama import SHAPES, random_backbone, shape_config
from transformers import AutoConfig

from medusa_train.errors import BackboneError
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.precision import free_memory

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
HEADS = 5
SPARE = 0.9  # share of the free memory that may be taken

#: weights as loaded; laid out for a CPU's kernels; passes of single rows compiled, with packed heads as `compile` has.
SETTINGS = ("stock", "packed", "compiled")


class Model(NamedTuple):
    """In which dtype the weights are, and which of `SETTINGS` they are made ready by."""

    dtype: str
    setting: str


class Unusable(Exception):
    """A setting does nothing for a model here; the message is the row's."""


@dataclass
class Loaded:
    """A model in one dtype and setting, and its drafts by what their rows are called."""

    backbone: Backbone
    drafts: dict[str, MedusaDraft]


@dataclass
class Shape:
    """A model that is not loaded yet: its name, where it lies (None: random weights), and how large it is."""

    name: str
    directory: Path | None
    config: Any
    sizes: Sizes

    @classmethod
    def of(cls, name: str) -> Shape:
        """By a name of the command line."""
        directory = None if name in SHAPES else TINY if name == "tiny" else Path(name)
        config = shape_config(name) if directory is None else AutoConfig.from_pretrained(directory).get_text_config()
        return cls(name if name == "tiny" or directory is None else directory.name, directory, config, Sizes.of(config))

    def needs(self, model: Model, device: torch.device, context: int, batch: int, nodes: int) -> int:
        """Bytes for weights, heads and the caches of a context: one for passes, three of one row for loops.

        On a CPU packed weights and the constants of a compiled pass are copies beside those that were loaded.
        """
        itemsize = getattr(torch, model.dtype).itemsize
        rows = 1 if model.setting == "compiled" else batch  # it is measured with single rows only
        positions = (context + nodes + 1) * rows + (3 * (context + LOOP_TOKENS + nodes) if rows == 1 else 0)
        heads = self.sizes.head_numbers(HEADS, shared=False)
        copied = heads + self.sizes.read if model.setting != "stock" and device.type == "cpu" else 0
        return self.sizes.model_bytes(itemsize) + (heads + copied + self.sizes.cached(positions, 1)) * itemsize

    def load(self, model: Model, device: torch.device) -> Loaded:
        """Weights and two kinds of heads, made ready; compiled passes are for as many threads as torch has now.

        Raises:
            Unusable: the setting does nothing for this model on this machine.
        """
        if model.setting == "packed" and device.type != "cpu":
            raise Unusable("weights are packed for CPUs only")
        if self.directory is None:
            backbone = random_backbone(self.config, getattr(torch, model.dtype), device, self.name)
        else:
            backbone = Backbone.load(str(self.directory), dtype=model.dtype, device=device)
        with device:  # or large heads would be made on the CPU first
            drafts = {
                "heads": MedusaDraft.from_backbone(backbone, HEADS),
                "shared heads": MedusaDraft.from_backbone(backbone, HEADS, share_lm_head=True),
            }
        if model.setting == "packed":
            _pack(backbone, drafts)
        elif model.setting == "compiled":
            _compile(backbone, drafts)
        return Loaded(backbone, drafts)


def _pack(backbone: Backbone, drafts: dict[str, MedusaDraft]) -> None:
    if not any([backbone.pack(), *(draft.prepack() for draft in drafts.values())]):
        raise Unusable("nothing was packed: no faster here, no such kernels for this dtype, or too little memory")


def _compile(backbone: Backbone, drafts: dict[str, MedusaDraft]) -> None:
    try:
        backbone.compile_passes()
    except BackboneError as error:
        reason = str(error).splitlines()[0].removeprefix("compile: ").removesuffix("; leave the key out")
        raise Unusable(f"not compiled: {reason}") from error
    for draft in drafts.values():
        draft.prepack()


def models_together(shape: Shape, asked: argparse.Namespace, device: torch.device) -> Iterator[tuple[list[Model], str]]:
    """Models that fit into memory together, to be measured in turn; one that does not fit alone with its obstacle.

    Args:
        asked: of it `dtypes`, `settings`, `contexts`, `batch` and `nodes`.
    """
    room = free_memory(device)
    together: list[Model] = []
    taken = 0.0
    for model in itertools.starmap(Model, itertools.product(asked.dtypes, asked.settings)):
        alone = shape.needs(model, device, min(asked.contexts), min(asked.batch), max(asked.nodes))
        if room is not None and alone > SPARE * room:
            yield [model], f"does not fit: needs {alone / 1e9:.1f} GB, {room / 1e9:.1f} GB are free"
            continue
        largest = shape.needs(model, device, max(asked.contexts), max(asked.batch), max(asked.nodes))
        if together and room is not None and taken + largest > SPARE * room:
            yield together, ""
            together, taken = [], 0.0
        together.append(model)
        taken += largest
    if together:
        yield together, ""


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Within: torch on so many threads; 0: as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
