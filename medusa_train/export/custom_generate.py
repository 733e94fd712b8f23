"""Decode with Medusa heads in transformers' `generate`, which loads this file as a
`custom_generate` directory.

    model.generate(**inputs, custom_generate=DIRECTORY, trust_remote_code=True)

`medusa-export --to transformers` copies this file as it is, so it imports only torch, safetensors
and transformers.

Each step guesses a tree of tokens with the heads, runs the model once over the whole tree, and
keeps the longest path of tokens that the model generates itself (Medusa, arXiv 2401.10774). Greedy
output equals that of plain `generate`, up to rounding if two logits are nearly equal. Sampled
output follows the model's own distribution.

DIRECTORY contains custom_generate/generate.py (this file) and:

    medusa_lm_head.safetensors
        {i}.{j}.linear.weight|bias   residual block j of head i, [d, d] and [d]
        {i}.{n}.weight|bias          output matrix of head i, [V, d]; missing if heads share lm_head
        token_map                    [N], token ids of the N rows of a reduced vocabulary
    config.json
        medusa_num_heads             number of heads
        medusa_num_layers            n, number of residual blocks per head
        stop_token_ids               stop tokens in addition to those of the model's generation
                                     config; the argument eos_token_id replaces both
    tree.json
        medusa_choices               the paths of the tree; [0, 2] is the third best guess of head 2
                                     below the best guess of head 1. The file may also be only the
                                     list of paths

Only one sequence at a time is decoded. Anything that is not supported raises a ValueError.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, silu
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationMixin,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.utils import cached_file

# Processors that read only scores and not the sequence. So each node of a tree can be processed
# like a row of a batch.
PROCESSORS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
MODEL_INPUTS = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Attention kernels on a GPU. cuDNN's is left out, because it builds a plan for each new length,
# which would be in every step.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only")

# Model -> its heads, with the directory, dtype and device for which they were loaded.
_loaded: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], Heads]] = WeakKeyDictionary()


def generate(
    inputs: Tensor | None = None, *, model: Any, medusa_heads: str | None = None, **arguments: Any
) -> Any:
    """Generate like `model.generate(inputs, **arguments)`, but with the heads in a directory or hub
    repository.

    Args:
        medusa_heads: directory or hub repository of the heads; by default the argument
            `custom_generate` of the calling `generate`.
    """
    # 1. Find the heads.
    source = medusa_heads or _requested_directory(sys._getframe(1))
    hub = {name: arguments.pop(name) for name in HUB_OPTIONS if name in arguments}
    for name in ("assistant_model", "synced_gpus"):
        if arguments.pop(name, None):
            raise refusal(f"{name} is not supported")
    # 2. Build the stopping criteria. `generate` does not pass `tokenizer` on to callables, so the
    # criterion that needs it is built here.
    criteria = list(arguments.get("stopping_criteria") or [])
    tokenizer = arguments.pop("tokenizer", None)
    stop_strings = arguments.pop("stop_strings", None)
    if stop_strings is not None:
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    stop_token_ids = _read_json(source, "config.json", hub).get("stop_token_ids")
    if stop_token_ids and arguments.get("eos_token_id") is None:
        criteria.append(EosTokenCriteria(stop_token_ids))
    if criteria:
        arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
    # 3. Read the tree.
    choices = _read_json(source, "tree.json", hub)
    if isinstance(choices, dict):
        choices = choices["medusa_choices"]
    # 4. Call transformers' `generate`. It prepares the inputs, processors and stopping criteria,
    # and then calls `decode`.
    method = partial(
        decode,
        heads=load_heads(model, source, hub),
        tree=Tree(choices, source, model.device),
        streamer=arguments.get("streamer"),
    )
    return GenerationMixin.generate(model, inputs, custom_generate=method, **arguments)


def _requested_directory(caller: Any) -> str:
    """Return the value of `custom_generate` in the frame of transformers' `generate`.

    transformers runs a copy of this file in its module cache, and passes neither the path of the
    original nor the argument on. So the caller's frame is the only way to find the heads.
    """
    directory = caller.f_locals.get("custom_generate")
    is_generate = caller.f_globals.get("__name__") == GenerationMixin.__module__
    if not is_generate or not isinstance(directory, str):
        raise refusal("pass the directory of the heads as medusa_heads=DIRECTORY")
    return directory


def _read_json(source: str, name: str, hub: dict[str, Any]) -> Any:
    with open(cached_file(source, name, **hub), encoding="utf-8") as file:
        return json.load(file)


class Tree:
    """The tree of guesses to verify. Node 0 is the root, which is the last token. Parents come
    before their children.

    Attributes:
        depth: number of heads that are used. width: number of guesses used from each head.
        depths: depth of each node, long [n + 1].
        guesses: index of nodes 1 .. n in the flat [depth x width] table of guesses, long [n].
        ancestors: bool [n + 1, n + 1]; row i is true at node i and at its ancestors.
        children: list of the children of each node.
    """

    def __init__(self, choices: list[list[int]], source: str, device: torch.device) -> None:
        paths = sorted({tuple(path) for path in choices}, key=lambda path: (len(path), path))
        nodes = {path: node for node, path in enumerate([(), *paths])}
        if not paths or any(len(path) == 0 or path[:-1] not in nodes for path in paths):
            raise refusal(
                f"{source}: tree.json: medusa_choices needs at least one path, and each path its"
                " parent"
            )
        self.depth = len(paths[-1])
        self.width = 1 + max(path[-1] for path in paths)
        self.depths = torch.tensor([0, *map(len, paths)], device=device)
        guesses = [(len(path) - 1) * self.width + path[-1] for path in paths]
        self.guesses = torch.tensor(guesses, device=device)
        self.ancestors = torch.eye(len(nodes), dtype=torch.bool, device=device)
        self.children: list[list[int]] = [[] for _ in nodes]
        for node, path in enumerate(paths, start=1):
            parent = nodes[path[:-1]]
            self.children[parent].append(node)
            self.ancestors[node] |= self.ancestors[parent]


class Heads:
    """Medusa heads, `softmax(W2 (SiLU(W1 h + b1) + h))` with one or more residual blocks (W1, b1).

    Heads without their own output matrices use the model's `lm_head`, or a copy of its rows
    `token_map`.
    """

    def __init__(
        self, tensors: dict[str, Tensor], count: int, blocks: int, lm_head: Any, source: str
    ) -> None:
        self.tensors = tensors
        self.count = count
        self.blocks = blocks
        self.token_map = tensors.get("token_map")
        # 1. Check that they fit this model.
        vocabulary, hidden_size = lm_head.weight.shape
        predicted = vocabulary
        if self.token_map is not None:
            predicted = len(self.token_map)
        shapes = {tuple(tensor.shape) for tensor in tensors.values() if tensor.dim() == 2}
        if not shapes <= {(hidden_size, hidden_size), (predicted, hidden_size)}:
            raise refusal(
                f"{source}: not the heads of this model (hidden size {hidden_size}, {vocabulary}"
                " tokens)"
            )
        # 2. Copy the rows of lm_head that heads with a reduced vocabulary share.
        if self.token_map is not None and f"0.{blocks}.weight" not in tensors:
            for kind, tensor in lm_head.named_parameters():
                rows = tensor[self.token_map]
                tensors |= {f"{head}.{blocks}.{kind}": rows for head in range(count)}

    def guess(self, hidden: Tensor, lm_head: Any, tree: Tree) -> Tensor:
        """Return the tokens of nodes 1 .. n, long [n], from the hidden state [d] of the last
        accepted token.

        Some models apply a scale and a soft cap to logits. They do not change the order of tokens,
        so they are left out.
        """
        best = []
        hidden = hidden.to(lm_head.weight.device)  # a model may be spread over several devices
        for head in range(tree.depth):
            state = hidden  # [d]
            for block in range(self.blocks):
                state = state + silu(self._linear(f"{head}.{block}.linear", state))
            matrix = f"{head}.{self.blocks}"
            if f"{matrix}.weight" in self.tensors:
                logits = self._linear(matrix, state)  # [V], or [N]
            else:
                logits = lm_head(state)
            best.append(logits.topk(tree.width).indices)
        table = torch.cat(best)  # [depth x width]
        tokens = table[tree.guesses.to(hidden.device)]  # [n]
        if self.token_map is None:
            return tokens
        return self.token_map[tokens]

    def _linear(self, name: str, states: Tensor) -> Tensor:
        return linear(states, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))


@torch.no_grad()
def load_heads(model: Any, source: str, hub: dict[str, Any]) -> Heads:
    """Load the heads for `model`, in its dtype and on its device. They are loaded again only if the
    directory, dtype or device changes.
    """
    key = (source, model.dtype, model.device)
    loaded = _loaded.get(model)
    if loaded is not None and loaded[0] == key:
        return loaded[1]
    config = _read_json(source, "config.json", hub)
    lm_head = model.get_output_embeddings()
    tensors = load_file(cached_file(source, "medusa_lm_head.safetensors", **hub))
    for name, tensor in tensors.items():
        dtype = model.dtype if tensor.is_floating_point() else torch.long
        tensors[name] = tensor.to(lm_head.weight.device, dtype)
    heads = Heads(tensors, config["medusa_num_heads"], config["medusa_num_layers"], lm_head, source)
    _loaded[model] = (key, heads)
    return heads


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    heads: Heads,
    tree: Tree,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Generate tokens after `input_ids` [1, T]; transformers' `generate` calls this function in
    place of its own loop.
    """
    check_supported(model, logits_processor, generation_config, model_kwargs)
    if tree.depth > heads.count:
        raise refusal(
            f"tree.json: the tree is {tree.depth} deep, but there are only {heads.count} heads"
        )
    prompt = unpadded_prompt(
        input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    )
    cache = empty_cache(
        model_kwargs.get("past_key_values"), model, prompt.shape[1], generation_config.max_length
    )
    lm_head = model.get_output_embeddings()
    sequence = input_ids

    def choose(logits: Tensor) -> Tensor:
        """Choose the token after each node, [n + 1, V] -> [n + 1], like plain `generate` after the
        last token.
        """
        scores = logits_processor(sequence, logits.float())
        if generation_config.do_sample:
            return torch.multinomial(scores.softmax(-1), 1)[:, 0]
        return scores.argmax(-1)

    def append(tokens: list[int]) -> bool:
        """Append tokens one by one; return whether one of them ends the answer. Tokens after it are
        dropped.
        """
        nonlocal sequence
        for token in tokens:
            sequence = torch.cat([sequence, sequence.new_tensor([[token]])], dim=1)
            if streamer is not None:
                streamer.put(sequence[0, -1:].cpu())
            if bool(stopping_criteria(sequence, None).all()):
                return True
        return False

    # 1. Run the prompt. Take its last hidden state, and choose the token after it, which is the
    # root.
    options = {}
    if "logits_to_keep" in model_kwargs:
        options["logits_to_keep"] = 1
    hidden, logits = forward(
        model, lm_head, prompt.to(model.device), past_key_values=cache, **options
    )
    last_state = hidden[0, -1]  # [d]
    root = int(choose(logits[0, -1:]))
    is_done = append([root])
    branches = torch.zeros(tree.ancestors.shape, dtype=hidden.dtype, device=hidden.device)
    branches.masked_fill_(~tree.ancestors.to(hidden.device), float("-inf"))  # [n + 1, n + 1]
    while not is_done:
        # 2. Guess the tokens of the tree.
        length = cache.get_seq_length()
        guesses = heads.guess(last_state, lm_head, tree)  # [n]
        nodes = torch.cat([guesses.new_tensor([root]), guesses])  # [n + 1]
        # 3. Run the model over all nodes. A node attends to the text so far, to its ancestors and
        # to itself. Nodes beyond max_length are never kept. Their positions are clamped, because
        # larger positions could change the rotary embeddings (see `empty_cache`).
        text = branches.new_zeros(len(nodes), length)
        mask = torch.cat([text, branches], dim=1)[None, None]  # [1, 1, n + 1, length + n + 1]
        positions = (length + tree.depths).clamp(max=generation_config.max_length - 1)[None]
        hidden, logits = forward(
            model,
            lm_head,
            nodes[None],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
        )
        # 4. Keep the path that the model generates itself. The token after it is the next root.
        path, tokens = accept(nodes, choose(logits[0]), tree)
        keep_path(cache, length, path)
        last_state = hidden[0, path[-1]]
        root = tokens[-1]
        is_done = append(tokens)
    if streamer is not None:
        streamer.end()
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequence)
    return sequence


def forward(model: Any, lm_head: Any, tokens: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Run the model; return the input of lm_head, which the heads read, and the logits."""
    inputs: list[Tensor] = []
    hook = lm_head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        with sdpa_kernel(KERNELS) if tokens.is_cuda else nullcontext():
            logits = model(tokens, use_cache=True, **arguments).logits
    finally:
        hook.remove()
    return inputs[0], logits


def accept(nodes: Tensor, following: Tensor, tree: Tree) -> tuple[list[int], list[int]]:
    """Go down from the root as long as a child has the token that the model chose after its parent.

    The model's choice at a node (argmax or sample) is the token that it would have generated there.
    So the result has the distribution of plain decoding, whatever was guessed.

    Args:
        nodes: the token of each node, long [n + 1].
        following: the token that the model chose after each node, long [n + 1].

    Returns:
        The accepted nodes, starting with the root, and the token chosen after each of them.
    """
    # a single transfer from the device
    guessed, chosen = torch.stack([nodes, following.to(nodes.device)]).tolist()
    path = [0]
    tokens = [chosen[0]]
    while True:
        matches = [child for child in tree.children[path[-1]] if guessed[child] == tokens[-1]]
        if not matches:
            return path, tokens
        path.append(matches[0])
        tokens.append(chosen[matches[0]])


def keep_path(cache: DynamicCache, length: int, path: list[int]) -> None:
    """Move the keys and values of the accepted nodes to the end of the text, in place, and drop
    those of all other nodes.
    """
    end = length + len(path)
    positions = torch.tensor(path) + length  # positions of the accepted nodes
    is_in_place = path[-1] == len(path) - 1
    for layer in cache.layers:
        for name in ("keys", "values"):
            stored = getattr(layer, name)  # [1, kv_heads, length + n + 1, head_dim]
            if not is_in_place:
                stored[:, :, length:end] = stored[:, :, positions.to(stored.device)]
            setattr(layer, name, stored[:, :, :end])


# What is supported


def refusal(problem: str) -> ValueError:
    """Return the error for a call that cannot be decoded with heads."""
    return ValueError(f"custom_generate with Medusa heads: {problem}")


def check_supported(
    model: Any, logits_processor: Any, generation_config: Any, model_kwargs: dict[str, Any]
) -> None:
    """Raise a ValueError that lists everything that is not supported."""
    problems = []
    attention = model.config.get_text_config()._attn_implementation
    if attention not in ("sdpa", "eager"):
        problems.append(
            f"attn_implementation={attention!r} takes no mask for a tree; load the model with"
            " 'sdpa'"
        )
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        problems.append(f"{mode.value} is not supported; only greedy decoding and sampling are")
    for processor in logits_processor:
        if not isinstance(processor, PROCESSORS):
            problems.append(
                f"{type(processor).__name__} is not supported, only temperature, top_k and top_p;"
                " the model's generation_config may set it (repetition_penalty=1.0 and the like"
                " turn it off)"
            )
    for name in OUTPUTS:
        if getattr(generation_config, name) and generation_config.return_dict_in_generate:
            problems.append(f"{name} is not supported")
    for name, value in sorted(model_kwargs.items()):
        if value is not None and name not in MODEL_INPUTS:
            problems.append(f"the model input {name} is not supported")
    if problems:
        raise refusal("; ".join(problems))


def unpadded_prompt(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> Tensor:
    """Return the prompt [1, T] without its left padding."""
    if len(input_ids) != 1:
        raise refusal(
            f"one sequence at a time, got {len(input_ids)} (batch size times num_return_sequences);"
            " call generate for each prompt"
        )
    padding = 0
    if attention_mask is not None:
        padding = int((attention_mask == 0).sum())
        if bool(attention_mask[0, :padding].any()):
            raise refusal("attention_mask may only mask padding on the left")
    prompt = input_ids[:, padding:]
    expected = torch.arange(prompt.shape[1], device=input_ids.device)[None]
    if position_ids is not None and not torch.equal(position_ids[..., padding:], expected):
        raise refusal("position_ids other than 0, 1, 2, ... are not supported")
    return prompt


def empty_cache(cache: Any, model: Any, prompt_length: int, max_length: int) -> DynamicCache:
    """Return an empty cache that keeps every position of every layer, because `keep_path` needs
    them.

    A sliding window would drop positions and need another mask. It makes no difference as long as
    the text is shorter than the window. Rotary embeddings that depend on the length of the text
    must not change inside a tree: "longrope" changes once, at the original length; "dynamic"
    changes at every position after it.
    """
    if not isinstance(cache, DynamicCache) or cache.offloading or cache.get_seq_length() > 0:
        raise refusal(
            "needs an empty DynamicCache; leave out past_key_values, use_cache and"
            " cache_implementation"
        )
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        raise refusal("this model has layers whose state is more than keys and values")
    limits = {
        layer.sliding_window: "a sliding window" for layer in cache.layers if layer.is_sliding
    }
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if prompt_length <= original or rope["rope_type"] == "dynamic":
            limits[original] = "rotary embeddings that change there"
    for limit, reason in limits.items():
        if max_length > limit:
            raise refusal(
                f"this model has {reason}, so prompt and answer must not exceed {limit} tokens, and"
                f" max_length is {max_length}; set max_new_tokens"
            )
    return DynamicCache()
