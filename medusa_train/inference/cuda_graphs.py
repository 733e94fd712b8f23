"""CUDA graphs: capture decoding steps, and replay them.

A step over a few tokens launches hundreds of small kernels, and launching them takes longer than
running them. A CUDA graph replays them with one launch, with the shapes and addresses that they
were captured with. So steps that are replayed have fixed shapes, see `inference.fixed_steps`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch

from medusa_train.models.hf_config import has_experts, length_dependent_rope
from medusa_train.models.precision import is_out_of_memory
from medusa_train.models.target_model import TargetModel

_log = logging.getLogger(__name__)


#: A step from fixed inputs to fixed outputs.
Step = Callable[[], None]


class Replayable(Protocol):
    """A captured step, for example a CUDA graph."""

    def replay(self) -> None:
        """Repeat the step."""


class FixedShapeRunner:
    """Runs steps of fixed shape as they are; its subclasses capture the steps and replay them."""

    def run(self, graphs: dict[Hashable, Replayable], key: Hashable, step: Step) -> None:
        """Run `step`.

        Args:
            graphs: what has been captured so far for the step's buffers.
            key: identifies the step's shapes and addresses.
            step: the step.
        """
        step()


class _NotCaptured(NamedTuple):
    """A step that is run instead of being replayed."""

    replay: Step


class GraphRunner(FixedShapeRunner):
    """Captures each step when it is first run, and replays it from then on.

    All graphs share one memory pool. That is safe in any order of replays, because a step leaves
    nothing in the pool: it copies its results to buffers outside. If a capture fails, steps run as
    they are and a warning says so.

    Attributes:
        works: False once a capture has failed, except for lack of memory.
    """

    def __init__(self) -> None:
        self.works = True

    def run(self, graphs: dict[Hashable, Replayable], key: Hashable, step: Step) -> None:
        """Run `step`, or replay what was captured under `key`.

        The first call runs the step once, as the warm-up; the capture itself runs nothing.
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
            if is_out_of_memory(error):  # only this step continues without a graph
                graphs[key] = _NotCaptured(step)
                return
            self.works = False
            reason = str(error).strip().partition("\n")[0]
            _log.warning(
                "CUDA graphs: capture failed, decoding continues without graphs: %s", reason
            )

    def _warm_up(self, step: Step) -> None:
        """Run the step before it is captured."""
        raise NotImplementedError

    def _capture(self, step: Step) -> Replayable:
        """Capture the step, without having to run it; return what replays it."""
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
        self._first: torch.cuda.CUDAGraph | None = None  # the first captured graph

    def _warm_up(self, step: Step) -> None:
        """Run the step on the capture stream, so that lazy kernels and workspaces exist."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)

    def _capture(self, step: Step) -> Replayable:
        """Return the graph of the step.

        Raises:
            RuntimeError: the step waits for the device, or memory is short.
        """
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may use the device during a capture, for example to write a checkpoint
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                step()
        except RuntimeError:
            # before torch 2.13, the allocator treats a failed capture as still running, and
            # `empty_cache` then fails
            with contextlib.suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
            raise
        finally:
            # a failed capture leaves the capture stream as the current stream
            torch.cuda.set_stream(current)
        # keep one graph alive: a pool without graphs can't be used for further captures
        if self._first is None:
            self._first = graph
        return graph


def use_cuda_graphs(target_model: TargetModel) -> None:
    """Decode in steps that are captured as CUDA graphs, if the model is on a GPU and its steps can
    be captured.
    """
    if target_model.step_runner is None:
        target_model.step_runner = graph_runner(target_model.device, target_model.model)


def graph_runner(device: torch.device, model: Any) -> CudaGraphRunner | None:
    """Return a runner that captures the steps of a transformers model on a GPU; None if they cannot
    be captured.
    """
    if device.type != "cuda":
        return None
    if (unsupported_reason := graph_unsupported_reason(model)) is not None:
        _log.info("no CUDA graphs, since the model %s", unsupported_reason)
        return None
    return CudaGraphRunner(device)


def graph_unsupported_reason(model: Any) -> str | None:
    """Return why the passes of a transformers model can't be captured (they make the host wait for
    the device); None if they can.
    """
    config = model.config.get_text_config()
    if (rope_type := length_dependent_rope(config)) is not None:
        return f"changes its rotary angles with the length ({rope_type})"
    if has_experts(config):
        return "routes tokens to experts"
    # 8-bit matrix products search for outliers on the host; 4-bit products never wait for the
    # device
    quantization = getattr(model.config, "quantization_config", None)
    four_bit = getattr(quantization, "load_in_4bit", False)
    if getattr(model, "is_quantized", False) and not four_bit:
        return "is quantized in 8 bits"
    return None


def weight_addresses(module: torch.nn.Module) -> list[int]:
    """Return the addresses of the parameters and buffers of a module."""
    addresses: list[int] = []
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                addresses.append(tensor.data_ptr())
    return addresses
