"""Capture steps on fixed memory as CUDA graphs and replay them: one launch for all kernels of a
step.

A decoding step over a few tokens launches hundreds of small kernels, which takes longer than they
run. A graph replays them with the shapes and addresses that they were captured with, so a step
reads its inputs from fixed buffers, leaves its results in fixed buffers, and never waits for the
device.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch

from medusa_train.models.backbone import Backbone
from medusa_train.models.hf_config import has_experts
from medusa_train.models.precision import is_out_of_memory

_log = logging.getLogger(__name__)

#: A step from fixed inputs to fixed outputs.
Step = Callable[[], None]


class Replayable(Protocol):
    """What was captured of a step, for example a CUDA graph."""

    def replay(self) -> None:
        """Repeat the step."""


class _AsItIs(NamedTuple):
    """A step that is run, not replayed."""

    replay: Step


class StepRunner:
    """Runs steps as they are."""

    def run(self, graphs: dict[Hashable, Replayable], key: Hashable, step: Step) -> None:
        """Run `step`, whose shapes and addresses `key` stands for; `graphs` were captured so far
        for its buffers.
        """
        step()


class GraphRunner(StepRunner):
    """Captures each step when it is first run, and replays it from then on.

    All graphs share one memory pool. That is safe in any order of replays, since a step leaves
    nothing in it: results are copied to buffers outside. If capture fails, steps run as they are
    and a warning says so.

    Attributes:
        works: whether no capture failed so far.
    """

    def __init__(self) -> None:
        self.works = True

    def run(self, graphs: dict[Hashable, Replayable], key: Hashable, step: Step) -> None:
        """Run `step`, or replay what was captured under `key`.

        The first run is the warm-up; capture runs nothing.
        """
        if key in graphs:
            graphs[key].replay()
            return
        if not self.works:
            step()
            return
        self._warm_up(step)
        try:
            graphs[key] = self._capture(step)
        except RuntimeError as error:
            if is_out_of_memory(error):  # this step alone goes on without a graph
                graphs[key] = _AsItIs(step)
                return
            self.works = False
            reason = str(error).strip().partition("\n")[0]
            _log.warning("CUDA graphs: capture failed, decoding goes on without graphs: %s", reason)

    def _warm_up(self, step: Step) -> None:
        raise NotImplementedError

    def _capture(self, step: Step) -> Replayable:
        raise NotImplementedError


class CudaGraphRunner(GraphRunner):
    """Captures steps as `torch.cuda.CUDAGraph`; see torch's notes on CUDA graphs, "Whole-network
    capture".
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._first: torch.cuda.CUDAGraph | None = None

    def _warm_up(self, step: Step) -> None:
        """Run the step on the stream of the captures, so that lazily created kernels and workspaces
        exist.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)

    def _capture(self, step: Step) -> Replayable:
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may use the device during a capture, for example to write a checkpoint
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                step()
        except RuntimeError:
            # before torch 2.13 the allocator still counts a failed capture as underway, and
            # `empty_cache` then fails
            with contextlib.suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
            raise
        finally:
            # a failed capture leaves its own stream as the current one
            torch.cuda.set_stream(current)
        # nothing can be captured to a pool all of whose graphs are gone
        self._first = self._first or graph
        return graph


def use_cuda_graphs(backbone: Backbone) -> None:
    """Decode in steps that are captured as CUDA graphs, on a GPU and where they can be captured."""
    backbone.step_runner = backbone.step_runner or graph_runner(backbone.device, backbone.model)


def graph_runner(device: torch.device, model: Any) -> CudaGraphRunner | None:
    """Return a runner that captures the steps of a transformers model on a GPU; None if they cannot
    be captured.
    """
    if device.type != "cuda":
        return None
    if (obstacle := graph_obstacle(model)) is not None:
        _log.info("no CUDA graphs, since the model %s", obstacle)
        return None
    return CudaGraphRunner(device)


def graph_obstacle(model: Any) -> str | None:
    """Return why a transformers model waits for the device in a pass, so that it can't be captured;
    None: it can.
    """
    config = model.config.get_text_config()
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope_type in ("dynamic", "longrope"):
        return f"changes its rotary angles with the length ({rope_type})"
    if has_experts(config):
        return "routes tokens to experts"
    # products in 8 bits look for outliers on the host, those in 4 bits wait for nothing
    four_bit = getattr(getattr(model.config, "quantization_config", None), "load_in_4bit", False)
    return (
        "is quantized in 8 bits" if getattr(model, "is_quantized", False) and not four_bit else None
    )
