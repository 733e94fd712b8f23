"""The first prompts of a run, as the model or the server would get them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from medusa_train.config.schema import SelfDistillConfig
from medusa_train.errors import DataError
from medusa_train.selfdistill.engines import model_name, resolve_model_paths, server_sampling
from medusa_train.selfdistill.modes import build_mode
from medusa_train.selfdistill.prompts import Prompt

PREVIEWED = 3  # prompts


def preview(cfg: SelfDistillConfig, prompts: Sequence[Prompt]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of the first request of each of the first prompts."""
    mode = build_mode(cfg)
    requests = [(prompt, next(mode(prompt))) for prompt in prompts[:PREVIEWED]]
    # 1. a server gets messages
    if cfg.engine == "openai":
        sampling = server_sampling(cfg)
        for prompt, request in requests:
            body = sampling.body(model_name(cfg), request)
            yield _title(prompt), json.dumps(body, indent=2, ensure_ascii=False)
        return
    # 2. a model in this process gets what the chat template renders
    from medusa_train.models.loading import load_tokenizer, resolve_backbone
    from medusa_train.selfdistill.chat_prompting import ChatPrompting

    paths = resolve_model_paths(cfg)
    where, _ = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)
    tokenizer = load_tokenizer(
        where, trust_remote_code=paths.trust_remote_code, special_tokens=paths.special_tokens
    )
    prompting = ChatPrompting(tokenizer, paths.chat_template, paths.chat_template_kwargs)
    for prompt, request in requests:
        try:
            count = len(prompting.prompt(request))
            text = prompting.text(request)
        except DataError as error:  # counted as refused by the run
            yield _title(prompt), str(error)
        else:
            yield f"{_title(prompt)}, {count} tokens", text


def _title(prompt: Prompt) -> str:
    turns = f"{len(prompt.turns)} turns" if len(prompt.turns) > 1 else "1 turn"
    return f"{prompt.id} ({prompt.source}), {turns}"
