r"""Extract from an answer the number that is its result, or the code of a function.

The result is taken from the first of these that the answer has: the last line marked with `####`,
the last `\boxed{}`, the text after "the answer is", the last number. In a marked line or a box the
result is the number at the beginning, unless it begins a calculation. Otherwise it is the number in
the last side of an equation that is not itself a calculation. If neither exists, there is no
result, because a wrong number would count as an answer.

The code is the first part of the answer that is valid Python and gives the function a body. The
parts are tried in this order: a fenced block that defines the function, a fenced block that
continues the prompt, a definition in the text, text that continues the prompt.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from decimal import Decimal

from medusa_train.evaluation.questions import FunctionTest

# Numbers

#: Patterns for LaTeX and Markdown around numbers and units, and their replacements. The thin space
#: (U+2009) also separates thousands.
_MARKUP = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[,;: ]|\\q?quad\b|~", "\u2009"),
        (r" ?\{ ?, ?\}", ","),
        (r"\\!|\\(?:left|right|displaystyle)\b|\\[()\[\]]|`", ""),
        (r"(?<![0-9)])\*\*|\*\*(?![0-9(])", ""),
        (r"\\([$%#])", r"\1"),
        (r"\\(?:times|cdot|ast)\b", "*"),
        (r"\\div\b", "÷"),
        (r"\\(?:approx|sim|to|rightarrow|Rightarrow|implies)\b|[≈→⇒]|[-=]>", "="),
        # wrapped words; applied twice, from the inside out, for one wrapper inside another
        *[(r"\\(?:text\w*|math\w+|mbox|underline|bold\w*)\s*\{([^{}]*)\}", r" \1 ")] * 2,
        (r"\^\s*(?:\{\\circ\}|\\circ\b)", "°"),
        # powers of units; subscripts
        (r"(?<=[^\W\d_])\s*\^\s*(?:\{\d+\}|\d+)", ""),
        (r"(?<=[^\W\d_])_(?:\w+|\{[^{}]*\})", ""),
        # fractions of units; fractions of numbers
        (r"\\[dtc]?frac\s*\{([^{}\d]*)\}\s*\{([^{}\d]*)\}", r" \1/\2 "),
        (r"(?<=[0-9])(?=\\[dtc]?frac)", " "),
        (r"\\[dtc]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))", r"\1\2/\3\4"),
    )
)
#: Numbers with thousands separators: 1,000 and 1 000 and 1'000, 1.000.000, 1,00,000.
_SEPARATED = re.compile(
    r"(?<![0-9.,])(?<![0-9] )(?:"
    r"[1-9][0-9]{0,2}(?:([,'’_ \u00a0\u2007\u2009\u202f])[0-9]{3})(?:\1[0-9]{3})*"
    r"|[1-9][0-9]{0,2}(?:\.[0-9]{3})+(?=,[0-9]{1,2}(?![0-9]))"
    r"|[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}"
    r"|[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}"
    r")(?![0-9])"
)
_DECIMAL_COMMA = re.compile(r"(?<![0-9.,])([0-9]+),([0-9]+)(?![0-9,])")
#: 1/2 and 2 1/2, but not a date such as 1/2/2024.
_FRACTION = re.compile(r"(?<![0-9/.])(?:([0-9]+) )?([0-9]+)/([1-9][0-9]*)(?![0-9/])")
#: Powers of ten in words, as exponents: 1.5 million, 70k.
_POWERS = {"k": 3, "thousand": 3, "million": 6, "billion": 9}
_POWER = re.compile(r"(?<=[0-9])(?:(k)| *(thousand|million|billion))\b", re.I)
#: A number. A minus sign after a number or a word does not belong to it: "10-5" contains 10 and 5.
#: Digits directly after a letter are part of a name, not a number.
_NUMBER = re.compile(
    r"((?<![\w)])[-−–])?[$€£¥₹]*(?<![^\W_])(?<![0-9]\.)(?<!\^)"
    r"((?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2}(?![\w.]))?)"
)
#: The beginning of a calculation: a number, perhaps its unit, an operator and the second operand;
#: a number and a factor in parentheses; a number and an exponent; or a number before a LaTeX
#: command.
_CALCULATION = re.compile(
    r"[0-9)]%?\s*(?:[^\W\d_]+\s+)?"
    r"(?:[-+*×·÷^/−–]|(?<![^\W\d_])[xX](?![^\W\d_])|\b(?:plus|minus|times|divided by)\b)"
    r"\s*[($€£]*\.?[0-9]|[0-9]\s*%\s*of\b|[0-9]\)?(?:\([$€£]?[0-9]|[²³⁴])|[0-9)]\s*\\[A-Za-z]"
)
#: A second number that belongs to the same result as the first, perhaps after the first one's unit:
#: 3 hours 30 minutes, 2:30, 12 apples and 5 pears. In "42 eggs in 3 boxes" the 3 does not belong.
_FURTHER = re.compile(
    r"(?:\s*(?:[,;:]|and\b|or\b)|\s+(?!(?:per|of|in|for|from|at|by|to|every|each|with|without|on|as"
    r"|out|over|under|after|before|within|until|than|about|around|because|since|when|if|is|are|left"
    r"|total|more|less|only|equals|means)\b)[^\W\d_]+\s+(?:(?:and|or)\s)?|\s)\s*[$€£]*[0-9]"
)
_ANSWER_WORDS = re.compile(
    r"\b(?:answer|result|total|solution)\b[^0-9=:\n]{0,60}?(?:\bis\b|\bare\b|[=:])", re.I
)
_MARKED = re.compile(r"####[\s:*]*([^\n]*)")
#: Headings, not results: `#### Step 3`.
_STEP = re.compile(r"(?:step|part|phase|case)\b", re.I)
#: Numbered headings: `#### 2. Sum`. On the last line with a number this is taken as a result.
_NUMBERED = re.compile(r"[0-9]+[.)][ \t]+\S")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?:\{((?:[^{}]|\{[^{}]*\})*)\}|([^\s{}$]+))")
#: A box with several results.
_SEVERAL = re.compile(r"[0-9].*(?:\b(?:and|or)\b|[,;]\s).*[0-9]", re.S)
_LETTER = re.compile(r"[^\W\d_]")


def extract_number(text: str) -> Decimal | None:
    """Return the result of an answer; None if no result can be read from it."""
    text = _plain_numbers(text)
    # 1. the last line marked with ####, unless it is a heading
    for marked in reversed(list(_MARKED.finditer(text))):
        line = marked[1]
        begins_with_number = re.match(r"[^\w\\]*[0-9]", line) and not _NUMBERED.match(line)
        says_result = begins_with_number or "=" in line or _ANSWER_WORDS.search(line)
        is_last = not re.search("[0-9]", text[marked.end() :])
        if (says_result or is_last) and not _STEP.match(line):
            number = _result_of(line)
            if number is not None or (is_last and _NUMBER.search(line)):
                return number
    # 2. the last box with a number
    boxes = [braced or bare for braced, bare in _BOXED.findall(text)]
    for box in reversed(boxes):
        if _NUMBER.search(box):
            return None if _SEVERAL.search(box) and "=" not in box else _result_of(box)
    # 3. the rest of the line after "the answer is"
    for answer_words in reversed(list(_ANSWER_WORDS.finditer(text))):
        if "answer" in answer_words[0].lower():
            line = text[answer_words.end() :].lstrip().split("\n")[0]
            if _NUMBER.search(line):
                return _result_of(line)
    # 4. the last number
    numbers = list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


def _plain_numbers(text: str) -> str:
    """Return the text without markup around numbers, and with decimal numbers: 1000 for 1,000 and
    0.5 for 1/2.
    """
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    text = _SEPARATED.sub(lambda found: re.sub("[^0-9]", "", found[0]), text)
    text = _DECIMAL_COMMA.sub(r"\1.\2", text)
    text = _FRACTION.sub(_as_decimal, text)
    return _POWER.sub(lambda found: f"e{_POWERS[(found[1] or found[2]).lower()]}", text)


def _as_decimal(match: re.Match[str]) -> str:
    """Return a matched fraction or mixed number as a decimal."""
    whole, numerator, denominator = (Decimal(part or 0) for part in match.groups())
    return f"{whole + numerator / denominator:f}"


def _result_of(part: str) -> Decimal | None:
    """Return the result in a marked line or a box; None if it contains no number, several results,
    or a calculation without its result.
    """
    if said := _ANSWER_WORDS.search(part):
        part = part[said.end() :]
    if boxed := _BOXED.search(part):
        part = boxed[1] or boxed[2]
    match = _NUMBER.search(part)
    if match is None:
        return None
    # 1. the number at the beginning, unless a second number belongs to it
    is_first = not _LETTER.search(part[: match.start()])
    if is_first and not _CALCULATION.match(part, match.end() - 1):
        return None if _FURTHER.match(part, match.end()) else _value(match)
    # 2. the last side of an equation that is not a calculation
    for side in reversed(part.split("=")):
        numbers = list(_NUMBER.finditer(side))
        if numbers and not _CALCULATION.search(side) and "\\" not in side:
            is_first = not _LETTER.search(side[: numbers[0].start()])
            return _value(numbers[0] if is_first else numbers[-1])
    return None


def _value(number: re.Match[str]) -> Decimal:
    minus, digits = number.groups()
    return -Decimal(digits) if minus else Decimal(digits)


# Code

#: A fenced block: its language and its code. The block may have no end, if the answer was cut off.
#: The closing fence may directly follow the last line of code, without a line break.
_BLOCK = re.compile(
    r"(?<![^\s:])(?:```+|~~~+)[ \t]*([^\s`]*)[^\n`]*\n(.*?)(?:^[ \t]*(?:```|~~~)|```[ \t]*$|\Z)",
    re.S | re.M,
)
_PYTHON = re.compile(r"(?:python\d*|py)", re.I)
#: How lines at the top level of a module begin: the keyword of an import or a definition, a
#: decorator, a comment, a closing bracket.
_TOP_LEVEL = re.compile(r"(import|from|def|class|async)\b|[@#)\]}]")
_FUTURE = re.compile(r"^from __future__ import .*$", re.M)
#: Statements that are kept after the function. All other statements after it are the answer's own
#: examples and tests.
_DEFINITIONS = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
    ast.Try,
)


def extract_function(test: FunctionTest, text: str) -> str:
    """Return the code of an answer, with the imports and helper functions of its prompt.

    If no part of the answer gives the function a body, the first candidate is returned.
    """
    text = text.replace("\r\n", "\n")
    for candidate in _candidates(test, text):
        program = _without_examples(_future_imports_first(candidate), test.entry_point)
        if program is not None:
            return program
    return _future_imports_first(next(_candidates(test, text)))


def _candidates(test: FunctionTest, text: str) -> Iterator[str]:
    """Yield candidate programs of an answer, in order of preference."""
    header = re.compile(rf"^(async )?def {test.entry_point}\b", re.MULTILINE)
    signature = header.search(test.prompt)
    before = "" if signature is None else test.prompt[: signature.start()]
    # 1. blocks that define the function, then blocks that continue the prompt. Blocks inside list
    # items are indented, so dedent them
    found = sorted(_BLOCK.findall(text), key=lambda block: not _PYTHON.fullmatch(block[0]))
    blocks = [textwrap.dedent(code) for _, code in found]
    # a closing fence may have text after it, and `_BLOCK` does not end there; so also cut there
    blocks += [code.partition("```")[0] for code in blocks if "```" in code]
    for code in blocks:
        if header.search(code):
            yield before + code
    for code in blocks:
        yield from _continued(test.prompt, code.rpartition(test.prompt.strip())[2])
    # 2. a definition in the text before the first fence. That fence may close a block whose opening
    # fence is not in the answer
    text = text.partition("```")[0]
    starts = [found.start() for found in header.finditer(text)]
    for start in starts:
        yield before + _without_prose(text, start)
    _, stub, rest = text.rpartition(test.prompt.strip())
    if starts and not stub:
        return
    # 3. if the text has no definition, or repeats the prompt: the longest beginning of the text, or
    # of the text after the repeated prompt, that continues the prompt
    for continuation in (rest, rest.partition(":\n")[2]):  # as it is, and after "Here it is:"
        lines = continuation.split("\n")
        for count in range(len(lines), 0, -1):
            yield from _continued(test.prompt, "\n".join(lines[:count]))


def _continued(prompt: str, body: str) -> Iterator[str]:
    """Yield the prompt followed by the function's body: with its indentation unchanged, with all
    lines indented, and with only the first line indented.

    Chat models may leave out the indentation of all lines or of the first line.
    """
    yield prompt + body
    yield prompt + textwrap.indent(textwrap.dedent(body), "    ")
    yield prompt + "    " + body.lstrip()


def _future_imports_first(program: str) -> str:
    """Return a program with its `from __future__` imports first, as Python requires."""
    return "\n".join([*_FUTURE.findall(program), _FUTURE.sub("", program)])


def _without_prose(text: str, start: int) -> str:
    """Return the definitions around position `start` of a text, without the sentences before and
    after them.
    """
    lines = text.split("\n")

    def is_code(line: str) -> bool:
        return not line[:1].strip() or _TOP_LEVEL.match(line) is not None

    first = last = text.count("\n", 0, start)  # the line at `start`
    while first > 0 and is_code(lines[first - 1]):
        first -= 1
    while last + 1 < len(lines) and is_code(lines[last + 1]):
        last += 1
    return "\n".join(lines[first : last + 1])


def _without_examples(program: str, entry_point: str) -> str | None:
    """Return a program without its own assertions, and without statements after the function that
    define nothing.

    None if the program is not valid Python, or if the function has no body, as in the prompt's
    stub.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about invalid escape sequences
            compile(program, "answer", "exec", dont_inherit=True)
            statements = ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    defined = None
    for position, statement in enumerate(statements):
        if _defines(statement, entry_point):
            defined = position
    if defined is None or _is_stub(statements[defined]):
        return None
    lines = program.split("\n")
    for position, statement in enumerate(statements):
        is_example = position > defined and (
            not isinstance(statement, _DEFINITIONS) or _runs_example(statement, entry_point)
        )
        if is_example or isinstance(statement, ast.Assert):
            end = statement.end_lineno or statement.lineno
            lines[statement.lineno - 1 : end] = [""] * (end - statement.lineno + 1)
    return "\n".join(lines)


def _runs_example(statement: ast.stmt, entry_point: str) -> bool:
    """Return whether an assignment calls the function, or calls `input` to ask for arguments."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return False
    calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return any(isinstance(call, ast.Name) and call.id in ("input", entry_point) for call in calls)


def _defines(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return statement.name == name
    if isinstance(statement, ast.Assign):
        return any(
            isinstance(target, ast.Name) and target.id == name for target in statement.targets
        )
    return False


def _is_stub(statement: ast.stmt) -> bool:
    """Return whether the body of a definition contains only a docstring, `pass`, `...`, a raised
    NotImplementedError, or a single word of prose.
    """
    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    for part in statement.body:
        if isinstance(part, ast.Expr):
            does_nothing = isinstance(part.value, (ast.Constant, ast.Name))
        elif isinstance(part, ast.Raise):
            does_nothing = "NotImplementedError" in ast.dump(part)
        else:
            does_nothing = isinstance(part, ast.Pass)
        if not does_nothing:
            return False
    return True
