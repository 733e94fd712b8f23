"""Incremental decoding: whole characters, the same text in total, nothing of a stop string."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_train.inference.detokenize import TextStream, answer_text, token_pieces

TEXT = "Grüße, 世界! 👩‍🚀 went   up.\n  Ends here…"


def _byte_level() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(["<eos>", *alphabet])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def _sentence_pieces() -> Any:
    """Like Llama's tokenizer: a leading space is part of the token, and that of the first token is
    dropped.
    """
    pieces = [
        "<eos>",
        "<unk>",
        "▁",
        "▁went",
        "▁up",
        ".",
        "W",
        "o",
        "rd",
        "▁s",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(pieces)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def _stream(
    tokenizer: Any, ids: list[int], stop: list[str] | None = None
) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, stop or [])
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream


def test_pieces_add_up_to_the_text_and_never_split_a_character() -> None:
    tokenizer = _byte_level()
    ids = _ids(tokenizer, TEXT)
    assert len(ids) > len(TEXT)  # characters of several tokens
    pieces, stream = _stream(tokenizer, [*ids, 0])
    assert "".join(pieces) == TEXT == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert not stream.stopped
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[2:4] == ["", "ü"]


def test_leading_spaces_survive_sentence_pieces() -> None:
    tokenizer = _sentence_pieces()
    ids = [3, 4, 9, 7, 8, 5, 2, 2, *(10 + byte for byte in "世".encode()), 4]
    pieces, _ = _stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert pieces[:4] == ["went", " up", " s", "o"]
    assert "世" in pieces


def test_a_space_after_a_skipped_token_survives() -> None:
    pieces, _ = _stream(_sentence_pieces(), [3, 0, 0, 4, 0, 9])
    assert pieces == ["went", "", "", " up", "", " s", ""]


def test_an_unfinished_character_comes_at_the_end() -> None:
    tokenizer = _byte_level()
    pieces, _ = _stream(tokenizer, _ids(tokenizer, "a世")[:-1])
    assert pieces == ["a", "", "", "\ufffd"]
    tokenizer = _sentence_pieces()  # which decode a whole run of bytes at once
    run = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "世".encode()]
    assert _stream(tokenizer, [*run, run[0]])[0] == ["", "", "世", "", "\ufffd"]


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (["went"], TEXT.split("went")[0]),
        (["界!", "。"], "Grüße, 世"),
        (["up.\n\n", "up.\n  E"], TEXT.split("up.")[0]),
    ],
)
def test_nothing_of_a_stop_string_is_shown(stop: list[str], shown: str) -> None:
    tokenizer = _byte_level()
    pieces, stream = _stream(tokenizer, _ids(tokenizer, TEXT), stop)
    assert stream.stopped
    assert "".join(pieces) == shown


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    tokenizer = _byte_level()
    pieces, stream = _stream(tokenizer, _ids(tokenizer, "aab aac aa"), ["aad"])
    assert "".join(pieces) == "aab aac aa"
    assert pieces[:3] == ["", "", "aab"]
    assert pieces[-1] == "aa"
    assert not stream.stopped


def test_token_pieces_include_special_tokens_and_never_split_a_character() -> None:
    tokenizer = _byte_level()
    assert token_pieces(tokenizer, [*_ids(tokenizer, "Größe"), 0]) == (
        "G",
        "r",
        "",
        "ö",
        "",
        "ß",
        "e",
        "<eos>",
    )


def test_token_pieces_of_an_unfinished_character() -> None:
    tokenizer = _byte_level()
    assert token_pieces(tokenizer, _ids(tokenizer, "aö")[:-1]) == ("a", "\ufffd")
    assert token_pieces(tokenizer, []) == ()


def test_reasoning_tags_stay_where_they_are_special_tokens() -> None:
    tokenizer = _byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>", "<pad>"]})
    tokens = tokenizer("<pad>a</think>b<eos>")["input_ids"]
    stream = TextStream(tokenizer)
    assert (
        "".join([*map(stream.push, tokens), stream.finish()])
        == answer_text(tokenizer, tokens)
        == "a</think>b"
    )
