"""Keep the hidden states of a frozen target model on disk, so that later epochs and runs need not
run the target model.

A document's states depend only on its tokens: packed or not, it starts at position 0 and attends to
nothing else. The states are stored when the first batch with this document is computed, and read
from then on. Rounding depends on the shape of a batch. So a run with the cache equals a run without
it bit for bit if all batches with a document have the same shape, and up to rounding otherwise.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from medusa_train.data.batch import Batch, Example
from medusa_train.data.hidden_state_store import StateFormat, StateStore, document_key
from medusa_train.errors import ConfigError
from medusa_train.io import describe_size, existing_parent, installed_version, write_failure
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates
from medusa_train.training.distributed import SINGLE_PROCESS, DistributedContext

_LIBRARIES = ("torch", "transformers", "medusa-train")
#: Entries of a model's config that do not affect its hidden states.
_NAMES = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")


@dataclass
class HiddenStateCache:
    """The states of a frozen target model: read from disk, or computed and stored.

    Attributes:
        device: device of the returned hidden states.
        rope_switch: see `TargetModel`. If any position of a batch reaches this number, the model
            computes the whole batch with other rotary angles.
        distributed: the processes that train together. All of them must call `hidden_states`
            equally often.
        read, computed: number of documents whose states this process read from disk, and number of
            documents that it computed.
    """

    store: StateStore
    device: torch.device
    rope_switch: int | None = None
    distributed: DistributedContext = SINGLE_PROCESS
    warn: Callable[[str], None] = print
    read: int = 0
    computed: int = 0
    _writable: bool = field(default=True, repr=False)
    _warned: bool = field(default=False, repr=False)

    def hidden_states(self, batch: Batch, compute: Callable[[], HiddenStates]) -> HiddenStates:
        """Return the hidden states of `batch`. `compute` runs the target model on it; it is called
        unless all documents are stored.

        At padding, states from disk are zero, and computed states are the target model's output. A
        target model that is partitioned over the processes must run in all of them, so it runs in
        all if any process lacks a document.
        """
        documents = list(self._documents(batch))
        states, missing_documents = self._read(batch, documents)
        if not self.distributed.any(bool(missing_documents)):
            self.read += len(documents)
            first, *aux = states.to(self.device, non_blocking=True)  # [B, T, d] each
            return HiddenStates(first, torch.cat(aux, dim=-1) if aux else None)
        hidden_states = compute()
        self.computed += len(documents)
        # these are views: assigning to them changes `hidden_states` in place
        computed = _states_of(hidden_states)
        for document in documents:
            # use the stored values of known documents, because a resumed run reads them too
            if document not in missing_documents:
                for state, stored in zip(computed, states, strict=True):
                    state[document.row, document.part] = stored[document.row, document.part].to(
                        self.device
                    )
        self._write(missing_documents, computed)
        return hidden_states

    def describe(self) -> str:
        """Describe in one sentence what all processes read and computed. All of them must call
        this.
        """
        gathered = self.distributed.gather((self.read, self.computed, self.store.damaged))
        read, computed, damaged = (sum(counts) for counts in zip(*gathered, strict=True))
        noted = f"; {damaged} files were damaged" if damaged else ""
        return (
            f"states of {read:,} documents read, {computed:,} computed{noted}"
            f" ({self.store.directory})"
        )

    def _documents(self, batch: Batch) -> Iterator[_Document]:
        assert batch.documents is not None
        context = ""
        if self.rope_switch is not None and int(batch.positions.max()) >= self.rope_switch:
            context = "beyond rope_switch"
        for row, examples in enumerate(batch.documents):
            start = 0
            for example in examples:
                end = start + len(example)
                yield _Document(document_key(example, context), row, slice(start, end))
                start = end

    def _read(self, batch: Batch, documents: list[_Document]) -> tuple[Tensor, list[_Document]]:
        """Return the stored states [states, B, T, d], on the CPU, and the documents without any."""
        spec = self.store.format
        pinned = self.device.type == "cuda"
        states = torch.zeros(
            spec.states, *batch.tokens.shape, spec.width, dtype=spec.dtype, pin_memory=pinned
        )
        missing_documents: list[_Document] = []
        for document in documents:
            values = self.store.read(document.key, document.part.stop - document.part.start)
            if values is None:
                missing_documents.append(document)
            else:
                states[:, document.row, document.part] = values
        if self.store.damaged and not self._warned:
            self._warned = True
            self.warn(
                f"cache_hidden_states: damaged files in {self.store.directory} are computed again"
            )
        return states, missing_documents

    def _write(self, documents: list[_Document], computed: list[Tensor]) -> None:
        """Store the states of `documents`; if the disk is full, the run continues without storing.

        Args:
            computed: one tensor [B, T, d] per state.
        """
        if not documents or not self._writable:
            return
        states = [state.cpu() for state in computed]
        try:
            for document in documents:
                if document.key not in self.store:  # a batch may have a document twice
                    values = torch.stack([state[document.row, document.part] for state in states])
                    self.store.write(document.key, values)
        except OSError as error:
            self._writable = False
            reason = write_failure("hidden states", self.store.directory, error)
            self.warn(
                f"cache_hidden_states: {reason}; states that are not stored are computed in every"
                " epoch"
            )


@dataclass(frozen=True, slots=True)
class _Document:
    """A document's key and its position in a batch."""

    key: str
    row: int
    part: slice


def _states_of(hidden_states: HiddenStates) -> list[Tensor]:
    """Return the final states and each layer's auxiliary states as views [B, T, d]."""
    if hidden_states.aux is None:
        return [hidden_states.final]
    width = hidden_states.final.shape[-1]
    return [hidden_states.final, *hidden_states.aux.split(width, dim=-1)]


# Start of a run


def open_hidden_states(
    prepared: Path,
    examples: Iterable[Example],
    aux_layers: tuple[int, ...],
    target_model: TargetModel,
    distributed: DistributedContext,
    console: Console,
    tf32: bool,
) -> HiddenStateCache:
    """Open the hidden-state cache of a frozen target model in the directory `prepared`, and print
    its size with the states of all `examples`.
    """
    fingerprint = distributed.run_on_main(target_model_fingerprint, target_model, aux_layers, tf32)
    directory = prepared / f"hidden-states-{fingerprint[:32]}"
    with torch.no_grad():  # run one token to learn the dtype and width of the states
        states = _states_of(
            target_model.run(
                torch.zeros(1, 1, dtype=torch.long, device=target_model.device),
                aux_layers=aux_layers,
            )
        )
    store = StateStore(directory, StateFormat(len(states), states[0].shape[-1], states[0].dtype))
    line = distributed.run_on_main(_prepare, store, examples)
    console.print(f"hidden states: {line}")
    return HiddenStateCache(
        store,
        target_model.device,
        target_model.rope_switch,
        distributed,
        lambda text: console.print(text, style="yellow"),
    )


def distinct_documents(examples: Iterable[Example]) -> dict[str, int]:
    """Return the key of every distinct document -> its number of tokens."""
    return {document_key(example): len(example) for example in examples}


def describe_states(format: StateFormat, tokens: int) -> str:
    """Return the product that gives the size of the states of `tokens` tokens, as text."""
    states = "" if format.states == 1 else f" x {format.states} states"
    return f"{tokens:,} tokens x {format.width:,} values{states} x {format.dtype.itemsize} bytes"


def target_model_fingerprint(
    target_model: TargetModel, aux_layers: tuple[int, ...], tf32: bool = False
) -> str:
    """Return a digest of everything except the tokens that determines the states: weights, config,
    layers and library versions.
    """
    config = target_model.model.config.to_dict()
    inputs = {
        "config": {name: value for name, value in config.items() if name not in _NAMES},
        "early": aux_layers,
        "dtype": str(target_model.dtype),
        "tf32": tf32,
        "libraries": [installed_version(name) for name in _LIBRARIES],
    }
    digest = sha256(json.dumps(inputs, sort_keys=True, default=str).encode())
    for name, value in target_model.model.state_dict().items():
        if isinstance(value, Tensor):
            digest.update(f"{name}{value.dtype}{list(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _prepare(store: StateStore, examples: Iterable[Example]) -> str:
    """Create the store's directory, and describe the size of the states of `examples`.

    Raises:
        ConfigError: the states that are not stored yet do not fit on the disk.
    """
    spec, directory = store.format, store.directory
    documents = distinct_documents(examples)
    needed_bytes = spec.size(sum(tokens for key, tokens in documents.items() if key not in store))
    free = shutil.disk_usage(existing_parent(directory)).free
    tokens = sum(documents.values())
    if needed_bytes > free:
        raise ConfigError(
            f"cache_hidden_states: {directory} needs {describe_size(needed_bytes)} more"
            f" ({describe_states(spec, tokens)}), {describe_size(free)} are free. Set"
            " dataset_prepared_path to a directory on a larger disk, or cache_hidden_states: false"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = write_failure("hidden states", directory, error)
        raise ConfigError(f"cache_hidden_states: {reason}") from error
    return (
        f"{describe_states(spec, tokens)} = {describe_size(spec.size(tokens))} in {directory}, "
        f"{describe_size(needed_bytes)} of them still to be computed"
    )
