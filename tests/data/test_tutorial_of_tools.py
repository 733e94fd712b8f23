"""The tutorial about agents shows what the code renders and supervises."""

import json
import re
from collections.abc import Callable
from typing import Any

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.data.examples import encode_examples
from medusa_train.data.records import normalize
from medusa_train.data.report import DataReport
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.training.inspect_run import masked_text
from tests import chat_templates
from tests.data.conftest import SPECIAL

PAGE = (PROJECT_ROOT / "docs" / "tutorials" / "agents-with-tools.md").read_text(encoding="utf-8")


def test_the_page_marks_what_is_supervised_in_its_chat(make_tokenizer: Callable[..., Any]) -> None:
    (record,) = re.findall(r"```json\n(.*?)\n```", PAGE, re.DOTALL)
    shown = re.search(r"like that of Qwen2\.5:\n\n```\n(.*?)\n```", PAGE, re.DOTALL)
    assert shown is not None
    tags = ["<tool_call>", "</tool_call>"]
    tokenizer = make_tokenizer(chat_templates.TOOLS_CHATML, special=[*SPECIAL, *tags])
    conversation = normalize(json.loads(record), variables=["tools"])
    report = DataReport(sequence_len=8192)
    (example,) = encode_examples(conversation, ChatEncoder(tokenizer), report)
    assert masked_text(example, tokenizer, limit=len(example)).plain == shown[1]
