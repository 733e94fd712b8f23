"""Results and code of answers, in the forms in which models write them and public scorers read
them.
"""

import sys
from collections.abc import Iterator
from decimal import Decimal

import pytest

from medusa_train.evaluation.answer_scores import build_program
from medusa_train.evaluation.questions import FunctionTest
from medusa_train.evaluation.read_answers import extract_number


@pytest.fixture(autouse=True)
def recursion_limit() -> Iterator[None]:
    """Restore the limit that a program of these tests raises."""
    limit = sys.getrecursionlimit()
    yield
    sys.setrecursionlimit(limit)


NARROW, THIN, UNBROKEN = "\u202f", "\u2009", "\u00a0"


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (f"1{NARROW}000", "1000"),
        (f"1{THIN}000", "1000"),
        (f"2{UNBROKEN}000{UNBROKEN}000", "2000000"),
        ("12 345 678", "12345678"),
        ("1'000", "1000"),
        ("1\u2019000", "1000"),
        ("1_000", "1000"),
        (r"1\,000", "1000"),
        ("1{,}000", "1000"),
        ("1 {, }000", "1000"),
        ("1.000.000", "1000000"),
        ("1.234,56", "1234.56"),
        ("1,00,000", "100000"),
        (f"$1{NARROW}234.50", "1234.50"),
        (f"-1{NARROW}000", "-1000"),
        ("18,000", "18000"),
        ("18.000", "18"),
        ("2,50", "2.50"),
        ("0,125", "0.125"),
        ("1000,99", "1000.99"),
    ],
)
def test_separators_of_thousands_and_decimals(number: str, value: str) -> None:
    for text in (f"#### {number}", rf"It is $\boxed{{{number}}}$.", f"That makes {number}"):
        assert extract_number(text) == Decimal(value), text


@pytest.mark.parametrize(
    "line",
    [
        "6 * 7 = 42",
        "6*7=42",
        "6 x 7 = 42",
        "6 × 7 = 42",
        r"6 \times 7 = 42",
        r"$6 \cdot 7 = 42$",
        "50 - 8 = 42 eggs",
        "84/2=42",
        "84 ÷ 2 = $42",
        "3 days * 14 eggs = 42 eggs",
        "$40 + $2 = $42",
        "50% of 84 = 42",
        "-5 + 47 = 42",
        "1/2 * 84 = 42",
        "6 times 7 = 42",
        "(6 * 7) = 42",
        "6 * 7 → 42",
        "6 * 7 => 42",
        "42 = 6 * 7",
        "42 (6 * 7 = 42)",
        "42, because 6 * 7 = 42",
        "x = 42",
        "= 42",
        "≈ 42",
        "After 3 days: 6 * 7 = 42",
        "She has 50 - 5 - 3 = 42 eggs left",
        "6(7) = 42",
        "(6)(7) = 42",
        "6² + 6 = 42",
    ],
)
def test_an_equation_on_the_marked_line_gives_its_result(line: str) -> None:
    assert extract_number(f"First 6, then 7.\n#### {line}") == 42


@pytest.mark.parametrize("calculation", ["6 * 7", "40 + 2", "10 - 3", "3 x $14", "6(7)", "7²"])
def test_a_calculation_without_its_result_gives_no_number(calculation: str) -> None:
    assert extract_number(f"#### {calculation}") is None
    assert extract_number(rf"\boxed{{{calculation}}}") is None


@pytest.mark.parametrize(
    "line",
    [
        *["3 hours 30 minutes", "1 hour and 30 minutes", "5 feet 6 inches", "3 h 20 min", "2:30"],
        *["12 apples and 5 pears", "3, 4", "3 or 4", "1 2 3", "2 dollars 50 cents"],
    ],
)
def test_several_numbers_give_no_number(line: str) -> None:
    assert extract_number(f"#### {line}") is None
    assert extract_number(rf"\boxed{{\text{{{line}}}}}") is None
    assert extract_number(f"The answer is {line}.") is None


@pytest.mark.parametrize(
    ("number", "value"),
    [
        *[("1.5 million", "1500000"), ("$70k", "70000"), ("70K dollars", "70000")],
        *[("2 thousand", "2000"), ("1.2e3", "1200"), ("3 1/2 million", "3500000")],
        *[("12 kids", "12"), ("42kg", "42"), ("42 after 3 days", "42")],
    ],
)
def test_powers_of_ten(number: str, value: str) -> None:
    assert extract_number(f"#### {number}") == Decimal(value)
    assert extract_number(
        rf"\boxed{{{number.replace(' million', chr(92) + 'text{ million}')}}}"
    ) == (Decimal(value))


@pytest.mark.parametrize(
    "text",
    [
        "#### The answer is 42",
        "#### The answer is 42 eggs for 3 people",
        "#### Answer: 42",
        "#### Final answer: $42.",
        "#### The final answer is $42$.",
        "#### Total: 42 eggs",
        "#### Total cost = $42",
        "#### Janet makes $42 every day",
        "#### The answer is 42\nLet me know if you need 3 more.",
        "#### 42 eggs\nThat took 3 steps.",
        "#### Final Answer\n42",
        "#### Final Answer\n\nThe total is 42.",
        "#### 2. Result\n42",
        "#### Step 1: 3 + 4 = 7\nThen 7 * 6 = 42.",
        "#### Step 3: Add\n35 + 7 = 42",
        "The answer is 42. I checked it 2 times.",
        "The answer is: **42** eggs in 3 boxes",
        "Answer: 42\nSteps: 3",
        "So the answer is 6 * 7 = 42, in 2 ways",
    ],
)
def test_words_around_a_result(text: str) -> None:
    assert extract_number(text) == 42


@pytest.mark.parametrize(
    "number",
    [
        *["**42**", "`42`", '"42"', "(42)", "~42", "+42", "€42", "£42", "42€", "US$42", "42 %"],
        *[
            r"42\%",
            r"\$42",
            r"$\$42$",
            r"\(42\)",
            r"\boxed{42}",
            r"$\boxed{42}$",
            r"\text{42 eggs}",
        ],
        *[r"\textbf{42}", "42 m²", "42 m^2", "42 km/h"],
    ],
)
def test_what_surrounds_the_number_on_the_marked_line(number: str) -> None:
    assert extract_number(f"#### {number}") == 42


@pytest.mark.parametrize(
    ("number", "value"),
    [
        ("1/2", "0.5"),
        ("-1/4", "-0.25"),
        ("4 1/2", "4.5"),
        (r"\frac{1}{2}", "0.5"),
        (r"\dfrac12", "0.5"),
        (r"2\frac{1}{2}", "2.5"),
        (r"\frac{3}{4} \text{ cup}", "0.75"),
        ("\u20137", "-7"),
        ("-€7", "-7"),
    ],
)
def test_fractions_and_signs(number: str, value: str) -> None:
    assert extract_number(f"#### {number}") == Decimal(value)
    assert extract_number(rf"\boxed{{{number}}}") == Decimal(value)


@pytest.mark.parametrize(
    "content",
    [
        r"42 \text{ m}^2",
        r"42\text{ m}^{2}",
        r"42\,\text{cm}^3",
        r"42 \text{ km}/\text{h}",
        r"42\ \mathrm{km/h}",
        r"42 \frac{\text{m}}{\text{s}^2}",
        r"42 \text{ dollars per 2 weeks}",
        r"42\text{ of }50",
        r"42 \text{ eggs in } 3 \text{ boxes}",
        r"\text{Total: }42",
        r"\text{\textbf{42 eggs}}",
        "x = 42",
        "x_1 = 42",
        r"6 \times 7 = 42",
        r"42\%",
        r"42^\circ",
        r"42^{\circ}",
    ],
)
def test_units_and_words_in_a_box(content: str) -> None:
    assert extract_number(rf"It is $\boxed{{{content}}}$, out of 50.") == 42


@pytest.mark.parametrize(
    "content",
    [
        r"12\text{ and }13",
        "(3, 4)",
        r"5\text{ hours and }30\text{ minutes}",
        r"\sqrt{2}",
        "10^3",
        r"2\pi",
    ],
)
def test_a_box_with_several_numbers_or_a_formula_gives_no_number(content: str) -> None:
    assert extract_number(rf"So \boxed{{{content}}}") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\fbox{42} 3", "42"),
        (r"\boxed 42 and 3", "42"),
        ("the number is not 10, it is 2,000.99m²", "2000.99"),
        ("Problems: 3,75 $ a..", "3.75"),
        ("QWERT2A", None),
        ("on 3/4/2024", "2024"),
        ("9 * 2 = $<<9*2=18>>18 every day", "18"),
    ],
)
def test_numbers_elsewhere(text: str, value: str | None) -> None:
    assert extract_number(text) == (None if value is None else Decimal(value))


def test_an_answer_that_loops_is_read_in_time() -> None:
    for words in ("answer ", "total ", "#### x\n", r"\text{", "1 000 "):
        extract_number(words * 4000)


PROMPT = (
    "from math import sqrt\n\ndef helper(x):\n    return x\n\n"
    'def root(x):\n    """Return the root.\n\n    >>> root(9)\n    3\n    """\n'
)
TEST = FunctionTest(
    PROMPT, "root", "def check(candidate):\n    assert [candidate(9), candidate(16)] == [3, 4]\n"
)
WHOLE = "def root(x):\n    return helper(sqrt(x))\n"
BODY = "    result = 0\n    while (result + 1) ** 2 <= x:\n        result += 1\n    return result"
FLAT = BODY.replace("\n    ", "\n").strip()


@pytest.mark.parametrize(
    "answer",
    [
        f"Here:\n```python\n{WHOLE.rstrip()}```\nDone.",
        f"```python\n{WHOLE.rstrip()}``` This returns the root.",
        f"```python\n{WHOLE.rstrip()} ```",
        f"{WHOLE}```\nThis returns the root.",
        f"{WHOLE.rstrip()}```\nThis returns the root.",
        f"{BODY}\n```\nDone",
        f"{BODY}```",
        f"````python\n{WHOLE}````\nDone",
        f"~~~python\n{WHOLE}~~~\nDone",
        f'```python title="root.py"\n{WHOLE}```',
        f"Sure: ```python\n{WHOLE}",
        f"```python\n{WHOLE}```".replace("\n", "\r\n"),
    ],
)
def test_fences_of_every_form(answer: str) -> None:
    exec(build_program(TEST, answer), {})


@pytest.mark.parametrize(
    "ending", ["", "    pass\n", "    ...\n", "    raise NotImplementedError\n"]
)
@pytest.mark.parametrize(
    "answer",
    [
        "The function:\n```python\n{stub}```\nThe answer:\n```python\n{whole}```",
        "```python\n{stub}```\nIts body:\n```python\n{body}\n```",
        "```python\n{stub}```\nIts body:\n```python\nreturn helper(sqrt(x))\n```",
        "```python\n{stub}\n{whole}```",
        "{stub}\nHere is the solution:\n\n{whole}\nIt works.",
        "We have\n\n{stub}\nso:\n```python\n{whole}```",
    ],
)
def test_the_stub_that_is_repeated_is_not_the_answer(answer: str, ending: str) -> None:
    exec(build_program(TEST, answer.format(stub=PROMPT + ending, whole=WHOLE, body=BODY)), {})


@pytest.mark.parametrize(
    "body",
    [
        "return helper(sqrt(x))",
        FLAT,
        f"{FLAT}\n\nThis counts up.",
        BODY.lstrip(),
        f"{BODY}\n\nThis counts up.",
        BODY.replace("    ", "  "),
        BODY.replace("    ", "\t"),
        '    """Return the root."""\n    return helper(sqrt(x))',
    ],
)
@pytest.mark.parametrize("fenced", [False, True])
def test_a_body_with_another_indentation(body: str, fenced: bool) -> None:
    if fenced:
        body = f"```python\n{body.split(chr(10) * 2)[0]}\n```"
    exec(build_program(TEST, body), {})


@pytest.mark.parametrize(
    "answer",
    [
        f"```python\n{PROMPT}{FLAT}\n```",
        f"{PROMPT}{FLAT}\n\nThis counts up.",
        f"The body:\n\n{BODY}",
        f"The body:\n\n{FLAT}\n\nThis counts up.",
    ],
)
def test_a_body_after_the_stub_or_after_words(answer: str) -> None:
    exec(build_program(TEST, answer), {})


@pytest.mark.parametrize(
    "answer",
    [
        f"```python\n{WHOLE}\nassert root(2) == 5\n```",
        f"```python\ndef f(x):\n    return 1\nassert f(1) == 5\n{WHOLE}```",
        f"```python\n{WHOLE}\nprint(root('a'))\n```",
        f"```python\n{WHOLE}\nfor x in 'ab':\n    print(root(x))\n```",
        f"```python\n{WHOLE}\nx = float(input())\nprint(root(x))\n```",
        f"```python\n{WHOLE}\nresult: float = root('a')\n```",
        f"```python\nroot(9)\n```\nwith\n```python\n{WHOLE}```",
        f"```bash\npip install nothing\n```\n```python\n{WHOLE}```",
        f"```python\nimport nothing\n```\n```\n{WHOLE}```",
    ],
)
def test_an_answers_own_examples_are_not_run(answer: str) -> None:
    exec(build_program(TEST, answer), {})


@pytest.mark.parametrize(
    "code",
    [
        "def root(x):\n    return sqrt(x) * ONE\n\nONE = 1\n",
        "def root(x):\n    return other(x)\n\ndef other(x):\n    return sqrt(x)\n",
        "class A:\n    def f(self, x):\n        return sqrt(x)\n\ndef root(x):\n    return A().f(x)\n",
        "from functools import cache\n\n@cache\ndef root(x):\n    return sqrt(x)\n",
        "import sys\nsys.setrecursionlimit(5000)\n\ndef root(x):\n    return sqrt(x)\n",
        "from __future__ import annotations\n\ndef root(x: Missing):\n    return sqrt(x)\n\nroot('a')\n",
        "root = lambda x: sqrt(x)\n",
    ],
)
def test_what_the_function_needs_is_kept(code: str) -> None:
    exec(build_program(TEST, f"```python\n{code}```"), {})


@pytest.mark.parametrize(
    "answer",
    [
        f"```python\n{PROMPT}```",
        PROMPT,
        "I cannot do that.",
        "",
        "Sure",
        "3",
        "```python\ndef root(x):\n    return helper(",
        "```python\nroot(9)\n```",
        f"```python\ndef root(x):\n    return 4\n```\nOr:\n```python\n{WHOLE}```",
    ],
)
def test_what_is_no_right_answer_fails(answer: str) -> None:
    with pytest.raises((AssertionError, SyntaxError, RecursionError, NameError)):
        exec(build_program(TEST, answer), {})
