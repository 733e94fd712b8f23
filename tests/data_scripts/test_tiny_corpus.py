"""Tests of data/tiny/corpus.py and chats.py: reading the sources, wordings, chats, tokenizer and
chat template.
"""

import hashlib

import chats
import corpus
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from medusa_train.config.paths import PROJECT_ROOT

SHIPPED = PROJECT_ROOT / "data" / "tiny"


def test_sources_are_cleaned(module: str) -> None:
    answer = "There are 3*12=<<3*12=36>>36 pencils.\n#### 36"
    assert corpus.clean_answer(answer) == "There are 3*12=36 pencils.\nThe answer is 36."
    (function,) = corpus.functions_in(module)
    assert (function.name, function.is_method) == ("label", True)
    assert function.signature == "label(self, text: str='x', *rest, size=3, **more)"
    assert function.bare_signature == "label(self, text, *rest, size, **more)"
    assert function.description == "Return the label of the box."
    assert function.answer.startswith("def label(")
    assert '"""' not in function.answer
    assert "Doc inside" not in function.answer


def test_epochs_are_those_of_the_shipped_model_and_requests_stay_the_same() -> None:
    """Every change to wordings, tables, thresholds or the order of draws changes a hash."""
    items: list[corpus.Item] = []
    for n in range(120):
        question = f"Ada has {n} boxes of {n + 5} pencils. How many pencils is that?"
        items.append(
            corpus.Problem(
                question, f"{n} * {n + 5} = {n * n + 5 * n}\nThe answer is {n * n + 5 * n}."
            )
        )
    for n, verb in enumerate(sorted(corpus.VERBS)):
        arguments = "self, box" if n % 3 == 0 else "box"
        signatures = f"{verb}_box({arguments}=None)", f"{verb}_box({arguments})"
        code = f"def {signatures[0]}:\n" + "    box += 1\n" * (6 + n % 9)
        items.append(
            corpus.Function(
                f"{verb}_box", *signatures, f"{verb.capitalize()} the box.", n % 3 == 0, code
            )
        )
    documents = corpus.Corpus(items, Tokenizer.from_file(str(SHIPPED / "tokenizer.json")), seed=0)
    epochs = documents.epoch(1), documents.brief_epoch(1), documents.held_out_chats()["problems"]
    ids = [[chat.ids for chat in epoch] for epoch in epochs]
    assert [len(epoch) for epoch in ids] == [256, 169, 4]
    assert max(map(len, ids[0])) > corpus.LONG_CHAT_TOKENS
    requests = [(r.history, r.text, r.is_code, r.follow_up) for r in documents.requests(36, 1)]
    digests = [hashlib.sha256(repr(drawn).encode()).hexdigest() for drawn in (ids, requests)]
    assert digests == [
        "71eb740ebbd9185c7cc7c579c87554207ed2849d42a8f71007bfa6f433bfef3a",
        "6d3552ff1c48c4bc367dd59ad013405e004f03e6abeaf57556db9c8ed46af82a",
    ]


def test_encoded_chats_equal_the_shipped_chat_template() -> None:
    assert (SHIPPED / "chat_template.jinja").read_text(encoding="utf-8") == chats.CHAT_TEMPLATE
    fast = AutoTokenizer.from_pretrained(SHIPPED)
    assert fast.convert_tokens_to_ids(list(chats.SPECIAL)) == list(range(6))
    turns = [("Add 1 and 2.", " def f():\n    return 3\n"), (" again ", "3")]
    messages = [
        {"role": r, "content": c}
        for turn in turns
        for r, c in zip(("user", "assistant"), turn, strict=True)
    ]
    (encoded,) = chats.encode_chats(fast.backend_tokenizer, [turns])
    rendered = fast.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded.ids == rendered["input_ids"]
    assert [int(mark) for mark in encoded.assistant] == rendered["assistant_masks"]
    answers = [i for i, mark in zip(encoded.ids, encoded.assistant, strict=True) if mark]
    assert fast.decode(answers) == " def f():\n    return 3\n</s>3</s>"
