"""What is asked of the tiny backbone while it is polished."""

from pathlib import Path
from random import Random

import corpus
from library import Library
from transformers import AutoTokenizer


def test_every_second_request_is_for_code_and_every_third_from_the_documents(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory).backend_tokenizer
    (function,) = corpus.functions_in('def label(a):\n    """Return the label of a."""\n' + "    a += 12345\n" * 6)
    problems = [corpus.Problem(f"Ada has {n} boxes. How many?", "The answer is 3.") for n in (12, 345, 6789)]
    library = Library([function, *problems], tokenizer)
    asked = library.requests(60, Random(0))
    assert [request.is_code for request in asked] == [False, True] * 30
    for number, request in enumerate(asked):
        from_documents = "Ada has" in request.text or "label" in request.text
        assert from_documents == (number % 3 == 0), request.text
        assert from_documents or not request.history
    assert any(request.history for request in asked)
    assert any(request.then for request in asked)
    assert asked == library.requests(60, Random(0))
