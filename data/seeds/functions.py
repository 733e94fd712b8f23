# ruff: noqa: E501
"""Requests for Python functions and methods for the tiny prompts: wordings, composed families, and
single ideas.

In descriptions a verb marked `~` takes the form that the wording needs ("return~": "return" or
"returns"), and `[one|or|other]` marks alternatives. The order of draws determines
data/seeds/tiny.jsonl: keep it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from drawing import Draw


@dataclass(frozen=True)
class FunctionSpec:
    """A function to write, or a method of the class that `owner` describes."""

    name: str
    arguments: str
    description: str
    owner: str | None = None  # "a class Playlist that keeps its songs in self.songs"


def draw_function(d: Draw) -> FunctionSpec:
    """Draw an idea (60 %) or a member of a family."""
    if d.rng.random() < 0.6:
        return from_idea(d, d.pick(*IDEAS))
    families, weights = zip(*FAMILIES, strict=True)
    family = d.rng.choices(families, weights)[0]
    return family(d)


def from_idea(d: Draw, idea: str) -> FunctionSpec:
    """Draw the names of a line of IDEAS."""
    names, arguments, description = (part.strip() for part in idea.split(";"))
    chosen: list[str] = []
    for index, argument in enumerate(re.split(r", (?![^(]*\))", arguments)):
        alternatives, equals, default = argument.partition("=")
        name = d.pick(*alternatives.split("|"))
        chosen.append(name + equals + default)
        description = description.replace(f"{{{index}}}", name)
    return FunctionSpec(d.pick(*names.split("|")), ", ".join(chosen), description)


def word_request(d: Draw, spec: FunctionSpec, *, is_later: bool) -> str:
    """Word a request as a user would; with `is_later` half of the wordings refer to an earlier
    turn.
    """
    description = d.expand(spec.description)
    wording = d.pick(*(LATER_TURN if is_later and d.rng.random() < 0.5 else FIRST_TURN))
    description = description[:1].lower() + description[1:]
    text = wording.format(
        sig=f"{spec.name}({spec.arguments})",
        kind="method" if spec.owner else "function",
        do=description.replace("~", ""),
        does=re.sub(r"(\w+)~", lambda match: third_person(match[1]), description),
    )
    if spec.owner is None:
        return text
    frame = d.pick("{text}", "{text} It is for {owner}.") if is_later else d.pick(*WITH_CLASS)
    return frame.format(owner=spec.owner, text=text)


def third_person(verb: str) -> str:
    """Return `returns` for `return`, `searches` for `search`, `tries` for `try`."""
    if verb.endswith(("s", "sh", "ch", "x", "z")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"


# fmt: off
# {sig}: name(arguments); {does}, {do}: "returns ...", "return ..."; {kind}: function or method
FIRST_TURN = (
    "Write a Python {kind} `{sig}` that {does}.",
    "Write `{sig}` in Python: it should {do}.",
    "Please write {sig}, a {kind} which {does}.",
    "I need some code. {sig} should {do}.",
    "Can you show me a {kind} {sig} that {does}?",
    "Implement `{sig}` so that it {does}.",
    "How would {sig} look in Python if it has to {do}?",
    "Define {sig}. The {kind} {does}.",
    "I want to {do}. Write {sig} for that.",
    "My script has to {do}; give me `{sig}`.",
    "Help me out with {sig}: a {kind} that {does}.",
    "Create a small {kind} `{sig}` to {do}.",
    "What is the code of a Python {kind} {sig} that {does}?",
    "Make a {kind} `{sig}` which {does}.",
    "For a project at work I need {sig}, which {does}.",
    "Is there a short way to {do}? Write it as {sig}.",
    "Python please: {sig}, to {do}.",
    "Task: {do}. Signature: {sig}.",
    "Could you implement a {kind} that {does}? Call it `{sig}`.",
    "Give me {sig}; it {does}.",
    "Let's write {sig}. It {does}.",
    "I'm looking for a {kind} `{sig}` that {does}.",
    "Show me how to {do} with a {kind} {sig}.",
    "We need a {kind} named {sig} in our program. It {does}.",
    "{sig} is missing from my module. It {does}. Please write it.",
    "Write the code for {sig}. What it does: it {does}.",
    "In Python, how do I {do}? The {kind} should be {sig}.",
    "Complete `def {sig}:` so that the {kind} {does}.",
)
LATER_TURN = (
    "Now write {sig}, which {does}.",
    "Also `{sig}`, to {do}.",
    "Next comes `{sig}`: it {does}.",
    "And a {kind} {sig} that {does}?",
    "Good, and {sig}? It should {do}.",
    "One more: {sig}, which {does}.",
    "Thanks! Can you also write {sig}, a {kind} that {does}?",
    "That helps. The next {kind} is `{sig}`; it {does}.",
    "I also have to {do}. Let that be {sig}.",
)
WITH_CLASS = (
    "I have {owner}. {text}",
    "For {owner}: {text}",
    "There is {owner}. {text}",
    "{text} It belongs to {owner}.",
    "Think of {owner}. {text}",
)

# singular: plural, then fields
THINGS = {
    "user": ("users", "name", "email", "country", "age"), "order": ("orders", "date", "price", "customer", "status"),
    "product": ("products", "price", "category", "weight", "code"), "employee": ("employees", "department", "salary", "name", "city"),
    "student": ("students", "grade", "school", "name", "score"), "message": ("messages", "sender", "date", "subject", "size"),
    "invoice": ("invoices", "number", "amount", "customer", "date"), "song": ("songs", "artist", "album", "length", "year"),
    "recipe": ("recipes", "author", "time", "title", "kind"), "city": ("cities", "country", "population", "name", "region"),
    "flight": ("flights", "airline", "price", "origin", "gate"), "book": ("books", "author", "year", "publisher", "title"),
    "car": ("cars", "color", "owner", "model", "speed"), "patient": ("patients", "doctor", "age", "room", "name"),
    "task": ("tasks", "priority", "owner", "deadline", "state"), "event": ("events", "date", "kind", "place", "source"),
    "comment": ("comments", "author", "score", "date", "topic"), "packet": ("packets", "source", "length", "protocol", "port"),
    "image": ("images", "width", "format", "owner", "size"), "session": ("sessions", "user", "start", "token", "address"),
    "rule": ("rules", "name", "weight", "action", "target"), "player": ("players", "team", "score", "level", "name"),
    "sensor": ("sensors", "location", "value", "unit", "id"), "job": ("jobs", "queue", "priority", "worker", "state"),
    "node": ("nodes", "depth", "label", "parent", "weight"), "movie": ("movies", "director", "rating", "year", "genre"),
}
CONDITIONS = {  # adjective: the noun it goes with
    "even": "numbers", "odd": "numbers", "negative": "numbers", "positive": "values", "empty": "lines", "long": "words",
    "short": "names", "unique": "values", "repeated": "words", "missing": "keys", "hidden": "files", "blank": "rows",
    "broken": "links", "unused": "names", "finite": "values", "numeric": "fields", "quoted": "strings", "upper_case": "words",
}
UNITS = (
    ("celsius", "fahrenheit"), ("feet", "meters"), ("miles", "kilometers"), ("pounds", "kilograms"),
    ("gallons", "liters"), ("hours", "seconds"), ("days", "minutes"), ("degrees", "radians"), ("bytes", "megabytes"),
    ("inches", "centimeters"), ("knots", "kilometers_per_hour"), ("rgb", "hex"), ("seconds", "minutes"),
)
LIST_CLASSES = (  # class, item, name of the attribute that is a list
    ("Playlist", "song", "songs"), ("Cart", "product", "products"), ("Stack", "value", "values"),
    ("Polygon", "point", "points"), ("Schedule", "task", "tasks"), ("Deck", "card", "cards"),
    ("Route", "stop", "stops"), ("Classroom", "student", "students"), ("Logger", "handler", "handlers"),
    ("Album", "photo", "photos"), ("Team", "player", "players"), ("Menu", "entry", "entries"),
    ("Pipeline", "stage", "stages"), ("Mailbox", "message", "messages"), ("Tree", "child", "children"),
)
DICT_CLASSES = (  # class, item, name of the attribute that is a dict
    ("Inventory", "item", "items"), ("Cache", "entry", "entries"), ("Config", "option", "options"),
    ("Registry", "handler", "handlers"), ("Dictionary", "word", "words"), ("Graph", "node", "nodes"),
    ("Scoreboard", "score", "scores"), ("Headers", "header", "headers"), ("Bank", "account", "accounts"),
    ("Router", "route", "routes"), ("Translator", "phrase", "phrases"), ("Catalog", "product", "products"),
)

def over_records(d: Draw) -> FunctionSpec:
    """Process a list of dicts by one of their fields."""
    thing = d.rng.choice(sorted(THINGS))
    many, *fields = THINGS[thing]
    key, other = d.sample(fields, 2)
    return d.pick(
        FunctionSpec(f"sort_{many}_by_{key}", f"{many}, reverse=False", f"return~ the {many} [sorted|ordered] by their {key}"),
        FunctionSpec(f"group_{many}_by_{key}", many, f"return~ a dict that maps [each|every] {key} to the list of {many} that have it"),
        FunctionSpec(f"index_{many}_by_{key}", many, f"build~ a dict from {key} to {thing} and raise~ KeyError if a {key} comes twice"),
        FunctionSpec(f"count_{many}_by_{key}", many, f"count~ how many {many} there are for each {key}"),
        FunctionSpec(f"find_{thing}_by_{key}", f"{many}, {key}", f"return~ the first of the {many} with the given {key}, or None"),
        FunctionSpec(f"filter_{many}_by_{key}", f"{many}, {key}", f"return~ [only the|a list of the] {many} whose {key} is equal to the given one"),
        FunctionSpec(f"load_{many}", d.pick("path", "filename"), f"read~ a [JSON|CSV] file and return~ the {many} in it as a list of dicts"),
        FunctionSpec(f"save_{many}", f"{many}, {d.pick('path', 'filename')}", f"write~ the {many} to a file, one JSON object a line"),
        FunctionSpec(f"validate_{thing}", thing, f"raise~ ValueError if the {key} or the {other} of the {thing} is missing or empty"),
        FunctionSpec(f"parse_{thing}_line", "line", f"split~ a line at its commas and return~ a dict with the {key} and the {other} of the {thing}"),
        FunctionSpec(f"format_{thing}", f"{thing}", f"return~ a line of text with the {key} and the {other} of a {thing}"),
        FunctionSpec(f"drop_{many}_without_{key}", many, f"return~ the {many} except those that have no {key}"),
        FunctionSpec(f"merge_{thing}_lists", "first, second", f"join~ two lists of {many}, keeping one {thing} for every {key}"),
        FunctionSpec(f"unique_{thing}_{key}_values", many, f"return~ the sorted set of all {key} values that the {many} have"),
        FunctionSpec(f"print_{many}", f"{many}, file=None", f"print~ {key} and {other} of each {thing} on a line of its own"),
        FunctionSpec(f"compare_{many}_by_{key}", "left, right", f"return~ a negative number, zero or a positive one as the {key} of the {thing} left is smaller, equal or larger"),
        FunctionSpec(f"update_{thing}_{key}", f"{thing}, {key}", f"store~ a new {key} in the {thing} and return~ the old one"),
        FunctionSpec(f"copy_{thing}_without_{key}", thing, f"return~ a copy of the {thing} that has everything but its {key}"),
    )

def over_conditions(d: Draw) -> FunctionSpec:
    """Process the elements that are even, empty, hidden, ..."""
    adjective = d.rng.choice(sorted(CONDITIONS))
    noun, phrase = CONDITIONS[adjective], adjective.replace("_", "-")
    return d.pick(
        FunctionSpec(f"count_{adjective}_{noun}", noun, f"count~ the {phrase} {noun} in a list"),
        FunctionSpec(f"keep_{adjective}_{noun}", noun, f"return~ a list of the {phrase} {noun} only"),
        FunctionSpec(f"skip_{adjective}_{noun}", noun, f"yield~ all {noun} but the {phrase} ones"),
        FunctionSpec(f"first_{adjective}_{noun[:-1]}", f"{noun}, default=None", f"return~ the first of the {noun} that is {phrase}, or the default"),
        FunctionSpec(f"split_{adjective}_{noun}", noun, f"return~ two lists, the {phrase} {noun} and all the others"),
        FunctionSpec(f"positions_of_{adjective}_{noun}", noun, f"return~ the indexes at which {phrase} {noun} stand"),
        FunctionSpec(f"has_{adjective}_{noun}", noun, f"tell~ whether any of the {noun} is {phrase}"),
        FunctionSpec(f"replace_{adjective}_{noun}", f"{noun}, replacement", f"return~ a copy of {noun} with the {phrase} ones replaced"),
    )

def over_units(d: Draw) -> FunctionSpec:
    """Convert one value or a list between two units."""
    a, b = d.pick(*UNITS)
    if d.rng.random() < 0.5:
        a, b = b, a
    x, y = a.replace("_", " "), b.replace("_", " ")
    return d.pick(
        FunctionSpec(f"{a}_to_{b}", d.pick("value", a), f"convert~ a value from {x} to {y}"),
        FunctionSpec(f"convert_{a}_list_to_{b}", "values", f"return~ a list with each value converted from {x} to {y}"),
        FunctionSpec(f"format_{a}_as_{b}", f"value, {d.pick('digits=1', 'precision=2')}", f"convert~ {x} to {y} and return~ the result as text with its unit"),
    )

def list_method(d: Draw) -> FunctionSpec:
    """Draw a method of a class that holds a list."""
    name_of_class, item, many = d.pick(*LIST_CLASSES)
    attribute = f"self.{many}"
    owner = d.pick(
        f"a class {name_of_class} that keeps its {many} in {attribute}",
        f"the class {name_of_class}, whose {many} are the list {attribute}",
    )
    name, arguments, description = d.pick(
        (f"add_{item}", f"self, {item}", f"append~ the {item} to {attribute} unless it is there already"),
        (f"remove_{item}", f"self, {item}", f"take~ the {item} out of {attribute} and raise~ ValueError if it is not in it"),
        (f"insert_{item}", f"self, index, {item}", f"put~ the {item} before the given position of {attribute}"),
        (f"pop_{item}", "self, index=-1", f"remove~ a {item} and return~ it, raising IndexError when there are no {many}"),
        (f"move_{item}", "self, old, new", f"move~ the {item} at one position of {attribute} to another"),
        (f"swap_{many}", "self, i, j", f"exchange~ two {many} by their positions"),
        (f"has_{item}", f"self, {item}", f"return~ True if the {item} is one of {attribute}"),
        (f"clear_{many}", "self", f"empty~ {attribute} and return~ how many {many} were in it"),
        (f"find_{many}", "self, predicate", f"return~ the {many} for which the predicate is true"),
        (f"last_{item}", "self, default=None", f"return~ the {item} at the end, or the default when {attribute} is empty"),
        (f"shuffle_{many}", "self, rng=None", f"bring~ {attribute} into a random order"),
        (f"sorted_{many}", "self, key=None", f"return~ a sorted copy of {attribute}"),
        (f"extend_{many}", f"self, {many}", f"add~ every {item} of an iterable by calling self.add_{item}"),
        (f"next_{item}", "self", f"return~ the {item} at self.position and go~ on to the next, starting over at the end"),
        ("__len__", "self", f"return~ the number of {many}"),
        ("__iter__", "self", f"iterate~ over a copy of {attribute}"),
        ("__contains__", f"self, {item}", f"test~ whether the {item} is in {attribute}"),
        ("__repr__", "self", f"return~ the name of the class and its {many}"),
        ("__add__", "self, other", f"return~ a new {name_of_class} with the {many} of both"),
        ("to_dict", "self", f"return~ a dict with the name of the class and the {many} as a list"),
    )
    return FunctionSpec(name, arguments, description, owner)

def dict_method(d: Draw) -> FunctionSpec:
    """Draw a method of a class that holds a dict."""
    name_of_class, item, many = d.pick(*DICT_CLASSES)
    attribute = f"self.{many}"
    owner = d.pick(
        f"a class {name_of_class} with a dict {attribute}", f"my {name_of_class} class, which stores its {many} by name in {attribute}",
    )
    name, arguments, description = d.pick(
        (f"get_{item}", "self, name, default=None", f"return~ the {item} of that name, or the default"),
        (f"set_{item}", f"self, name, {item}", f"store~ the {item} under its name and return~ the one it replaces"),
        (f"delete_{item}", "self, name", f"delete~ the {item} and raise~ KeyError with a clear message if there is none"),
        (f"rename_{item}", "self, old, new", f"give~ a {item} another name, refusing a name that is taken"),
        (f"has_{item}", "self, name", f"tell~ whether there is a {item} of that name"),
        (f"count_{many}", "self, prefix=''", f"count~ the {many} whose names begin with the prefix"),
        (f"update_{many}", "self, other", f"copy~ all {many} of another {name_of_class} into this one"),
        (f"{item}_names", "self", f"return~ the names of all {many}, sorted"),
        (f"load_{many}", "self, path", f"read~ {attribute} from a JSON file"),
        (f"save_{many}", "self, path", f"write~ {attribute} to a JSON file"),
        (f"expire_{many}", "self, now", f"remove~ the {many} whose time lies before now"),
        (f"require_{item}", "self, name", f"return~ the {item}, raising LookupError if it is unknown"),
        ("__getitem__", "self, name", f"return~ the {item} called name"),
        ("__setitem__", f"self, name, {item}", f"store~ the {item} after checking that the name is a string"),
        ("__delitem__", "self, name", f"remove~ the {item} called name"),
        ("__str__", "self", f"return~ one line for each of the {many}"),
        ("from_dict", "cls, data", f"create~ a {name_of_class} whose {many} come from a dict"),
        ("copy", "self", f"return~ another {name_of_class} with the same {many}"),
    )
    return FunctionSpec(name, arguments, description, owner)

# with weights
FAMILIES = ((over_records, 12), (over_conditions, 6), (over_units, 2), (list_method, 7), (dict_method, 6))

# names; arguments; description. Alternatives stand apart by `|`; `{0}`, `{1}`, ... are the names
# chosen for the arguments.
IDEAS = """
reverse_words|flip_words; text|sentence|phrase; return~ {0} with its words in the opposite order
word_lengths|length_of_words; text|sentence; return~ a list with the length of each word in {0}
capitalize_words|title_words; text|name; return~ {0} with the first letter of every word in upper case
is_palindrome|reads_both_ways; text|word; return~ True if {0} reads the same forwards and backwards, ignoring spaces
most_common_letter|favorite_letter; text|word|message; find~ the letter that [occurs|appears] most often in {0}
count_words|number_of_words; text|document; count~ the words of {0}, [which are apart by blanks|where any white space separates words]
word_frequencies|word_histogram; text|document, ignore_case=True; return~ a dict from each word of {0} to the number of times it occurs
remove_punctuation|strip_punctuation; text|line; delete~ all punctuation characters from {0} and return~ the result
squeeze_spaces|normalize_spaces; text|line; replace~ every run of white space in {0} by a single blank
wrap_text|break_lines; text|paragraph, width=70; break~ {0} into lines of at most {1} characters without cutting words
indent_lines|shift_right; text|block, prefix='    '; put~ {1} in front of every line of {0} that is not empty
common_prefix|shared_prefix; strings|names; return~ the longest prefix that all {0} have in common
common_suffix|shared_ending; left|first, right|second; return~ the longest ending that {0} and {1} share
split_camel_case|camel_words; name|identifier; split~ {0} at its capital letters and return~ the parts in lower case
slugify|make_slug; title|heading; turn~ {0} into a slug of lower-case letters, digits and hyphens
caesar_shift|shift_letters; text|message, offset|shift=3; replace~ each letter of {0} by the one {1} places further in the alphabet
run_length_encode|compress_runs; text|data; encode~ {0} as pairs of a character and the length of its run
run_length_decode|expand_runs; pairs|runs; rebuild~ the string from {0}, a list of characters with their run lengths
longest_word|widest_word; text|words; return~ the longest word in {0}, the first one if there are several
replace_tabs|expand_tab_stops; line|text, tab_size|width=8; replace~ the tabs of {0} by blanks up to the next multiple of {1}
strip_comments|remove_comments; source|line, marker|mark='#'; remove~ everything that follows {1} in {0} unless it stands in quotes
unquote_string|remove_quotes; value|text; remove~ the quotes around {0} if it begins and ends with the same quote character
quote_argument|shell_quote_word; word|argument; return~ {0} in single quotes if it holds characters that a shell treats specially
escape_html|html_escape; text|markup; replace~ the characters <, > and & in {0} by their entities
strip_tags|remove_markup; html|markup; remove~ all tags from {0} and return~ the text between them
render_template|fill_template; template|text, values|variables; replace~ each name in braces in {0} by its value in {1}
compare_versions|version_order; left|a, right|b; return~ -1, 0 or 1 depending on which of the version strings {0} and {1} is newer
parse_version|version_tuple; version|text; turn~ a version such as 3.11.4 into a tuple of integers
hamming_distance|count_mismatches; left|first, right|second; count~ the positions at which {0} and {1} differ and raise~ ValueError if their lengths are not equal
edit_distance|levenshtein; source|old, target|new; compute~ the least number of insertions, deletions and changes that turn {0} into {1}
find_all|occurrences; text|haystack, pattern|needle; return~ a list of all positions at which {1} begins in {0}
between|text_between; text|line, start|opening, end|closing; return~ the part of {0} between the first {1} and the next {2}
ordinal|ordinal_suffix; number|n; return~ {0} with its English ending, as in 1st, 2nd or 13th
pluralize|plural_form; noun|word, count|number; return~ {0} in the plural unless {1} is one
roman_numeral|to_roman; number|value; write~ {0} as a Roman numeral
from_roman|roman_to_int; numeral|text; return~ the integer that the Roman numeral {0} stands for
to_binary|binary_digits; number|value, width=0; return~ the binary digits of {0} as a string, filled with zeros to {1}
from_base|parse_in_base; digits|text, base=16; read~ {0} as a number in the given base
align_columns|format_table; rows|table, gap=2; return~ {0} as text in which every column is as wide as its longest cell
truncate_middle|shorten_middle; text|path, length|limit; shorten~ {0} to {1} characters by putting dots in its middle
valid_identifier|is_valid_name; name|text; check~ that {0} is a legal variable name and no keyword
initials|first_letters; name|full_name; return~ the first letter of each part of {0}, followed by dots
swap_case_at|toggle_letter; text|word, index|position; return~ {0} with the letter at {1} changed between upper and lower case
only_digits|extract_digits; text|phone; return~ the digits of {0} as one string
sum_of_digits|digit_sum; number|value; add~ up the decimal digits of {0}
merge_sorted|merge_two_sorted; left|first, right|second; merge~ two sorted lists into one sorted list
merge_intervals|join_overlapping; intervals|spans; merge~ the overlapping pairs in {0} and return~ them sorted
merge_sorted_intervals|combine_sorted_spans; left|first, right|second; merge~ two sorted lists of intervals into one without overlaps
intersect_intervals|common_spans; first|left, second|right; return~ the parts that two lists of intervals have in common
binary_search|find_sorted; values|items, target|wanted; return~ the index of {1} in the sorted list {0}, or -1
insert_sorted|add_in_order; values|items, value|item; insert~ {1} into the sorted list {0} so that it stays sorted
bubble_sort|sort_by_swaps; values|items; sort~ {0} in place by swapping neighbors
insertion_sort|sort_cards; values|items; sort~ {0} by moving each element back to its place
quick_sort|sort_quickly; values|items; return~ {0} sorted, splitting around a pivot and calling itself
is_sorted|in_order; values|items, reverse=False; return~ True if {0} never [goes down|falls], or never [goes up|rises] when {1} is set
pairwise_differences|steps_between; values|numbers; return~ the differences between neighboring elements of {0}
every_nth|take_every; items|values, n|step; return~ every {1}th element of {0}, beginning with the first
sliding_windows|overlapping_parts; items|values, size|width; yield~ each run of {1} consecutive elements of {0} as a tuple
split_at|cut_at; items|values, index|position; return~ the part of {0} before {1} and the part after it
split_on|divide_at_value; items|values, separator|marker; split~ {0} into lists at each element equal to {1}
flatten_nested|flatten_deep; items|nested; yield~ the elements of {0}, going down into lists of lists
zip_longest_lists|pair_up; left|first, right|second, fill=None; pair~ the elements of two lists and use~ {2} where one is too short
compact|drop_empty; items|values; remove~ all false values from {0}
frequency_table|tally; items|values; count~ how often each value occurs in {0}
mode_of|most_frequent; values|items; return~ the value that occurs most often in {0}, raising ValueError if it is empty
median_of|middle_value; values|numbers; return~ the median of {0}
variance_of|spread; values|numbers, mean=None; compute~ the variance of {0}, with the mean given or computed
weighted_mean|weighted_average; values|scores, weights|counts; return~ the mean of {0} weighted by {1}
normalize|scale_to_one; values|weights; divide~ each of {0} by their sum so that they add up to one
clamp_all|limit_values; values|numbers, low|minimum, high|maximum; replace~ every value below {1} or above {2} by that limit
largest_gap|widest_gap; values|numbers; return~ the largest distance between neighbors once {0} is sorted
longest_run|longest_streak; values|items; return~ the longest run of equal neighbors in {0} as value and length
longest_increasing_run|longest_climb; values|numbers; find~ the longest stretch of {0} in which each number is larger than the one before
max_subarray|best_segment; values|numbers; return~ the largest sum of consecutive elements of {0}
two_sum|pair_with_sum; numbers|values, target|total; find~ the positions of two numbers in {0} that add up to {1}
top_scores|largest_items; values|scores, count|k=3; return~ the {1} largest values of {0} in descending order
rank_values|ranks_of; values|scores; return~ the rank of each value in {0}, equal values sharing one
dot_product|inner_product; left|a, right|b; multiply~ two vectors element by element and add~ up the products
matrix_product|multiply_matrices; left|a, right|b; multiply~ two matrices given as lists of rows
identity_matrix|unit_matrix; size|n; return~ a square matrix with ones on its diagonal
diagonal|main_diagonal; matrix|rows; return~ the elements of {0} whose row and column are the same
spiral_order|walk_spiral; matrix|grid; return~ the elements of {0} in a spiral from the outside to the center
neighbors_of|adjacent_cells; grid|board, row|y, column|x; return~ the cells beside the given one that lie inside {0}
permutations_of|all_orders; items|values; yield~ every order in which {0} can stand
subsets_of|power_set; items|values; yield~ all subsets of {0}, beginning with the empty one
cartesian_pairs|all_pairs; left|rows, right|columns; yield~ each combination of an element of {0} and one of {1}
shuffle_copy|shuffled; items|cards, rng=None; return~ {0} in random order and leave~ the original alone
pick_weighted|weighted_choice; items|options, weights|chances; choose~ one of {0} at random according to {1}
batched_items|in_batches; iterable|stream, size|count; yield~ lists of up to {1} elements taken from {0}
take_until|read_until; iterable|stream, predicate|stop; yield~ elements of {0} until {1} returns true for one
invert_dict|swap_keys_and_values; mapping|table; return~ a new dict whose keys are the values of {0}
merge_dicts|combine_dicts; first|base, second|other; return~ a dict with the entries of both, {1} winning
deep_merge|merge_recursively; base|defaults, extra|changes; copy~ the entries of {1} into {0}, going into nested dicts
pick_keys|select_keys; mapping|record, keys|names; return~ the entries of {0} whose keys are in {1}
without_keys|omit_keys; mapping|record, keys|names; return~ {0} without the entries named in {1}
rename_keys|map_keys; mapping|record, names|translation; return~ {0} with its keys replaced as {1} says
flatten_dict|dotted_keys; mapping|tree, separator='.'; turn~ nested dicts into one whose keys are joined by {1}
unflatten_dict|nest_keys; mapping|flat, separator='.'; turn~ keys such as a.b into nested dicts
get_path|dig; mapping|data, path|keys, default=None; follow~ {1} through nested dicts and return~ {2} if a key is missing
set_path|put_deep; mapping|data, path|keys, value; store~ {2} in nested dicts and create~ those that are missing
dict_difference|compare_dicts; old|before, new|after; return~ the keys that were added, removed and changed between {0} and {1}
sort_by_value|order_by_value; mapping|counts, reverse=False; return~ the items of {0} sorted by value
count_values|value_counts; mapping|table; count~ how many keys of {0} have each value
group_pairs|collect_pairs; pairs|items; collect~ (key, value) pairs into a dict of lists
first_missing_key|missing_key; mapping|record, required|keys; return~ the first of {1} that {0} lacks, or None
filter_values|keep_values; mapping|table, predicate|test; return~ the entries of {0} whose value passes {1}
default_for|get_or_call; mapping|cache, key|name, factory|make; return~ the value of {1}, calling {2} and storing what it gives if there is none
add_counts|sum_counters; left|first, right|second; add~ up two dicts of counts key by key
list_files|find_files; directory|root, pattern='*'; return~ the paths below {0} that match {1}, sorted
ensure_directory|make_directory; path|directory; create~ {0} with all its parents unless it exists
read_json|load_json; path|filename; open~ {0} and return~ the JSON value in it
write_json|dump_json; path|filename, value|data, indent=2; write~ {1} to {0} as JSON
read_csv_rows|load_rows; path|filename, delimiter=','; read~ {0} and return~ its rows as dicts keyed by the header
write_csv_rows|save_rows; path|filename, rows|records; write~ {1}, a list of dicts, to a CSV file with a header line
read_chunks|iter_blocks; stream|file, size|block_size=4096; yield~ pieces of {1} bytes from {0} until it is empty
file_checksum|hash_file; path|filename, algorithm='sha256'; return~ the hex digest of {0}, reading it in blocks
same_contents|files_equal; left|first, right|second; compare~ two files byte by byte
atomic_write|write_safely; path|filename, data|text; write~ {1} to a temporary file and rename~ it to {0}
append_line|log_line; path|filename, line|message; add~ {1} with a newline at the end of {0}
iter_records|read_blocks; lines|stream; yield~ the groups of lines in {0} that blank lines separate
grep_lines|matching_lines; path|filename, pattern|regex; yield~ the number and text of each line of {0} that matches {1}
touch|update_timestamp; path|filename; create~ {0} if it is missing, else set~ its modification time to now
remove_tree|delete_recursively; path|directory; delete~ {0} and everything in it
free_name|unused_path; path|filename; return~ {0}, or the same with a number added if it exists already
split_path|path_parts; path|name; return~ the directory, base name and extension of {0}
relative_to_root|shorten_path; path|filename, root|base; return~ {0} relative to {1} if it lies below it
read_lines_reversed|lines_from_end; path|filename; yield~ the lines of {0} from the last to the first
find_program|locate_command; name|command, path=None; search~ the directories of PATH for an executable called {0}
run_command|execute; command|args, timeout=None; run~ {0} as a subprocess and return~ its output as text
parse_arguments|parse_options; argv|args; split~ {0} into options that begin with two dashes and positional arguments
get_env_flag|env_bool; name|variable, default=False; return~ True if the environment variable {0} is 1, yes or true
parse_log_line|split_log_entry; line|entry; return~ the date, level and message of {0}
parse_url|split_url; url|address; split~ {0} into scheme, host, port and path
build_query|encode_query; params|fields; join~ {0} with & signs after escaping keys and values
parse_query|decode_query; query|text; return~ a dict from the names in {0} to lists of values
parse_header|split_header; line|header; split~ {0} at its first colon and return~ name and value without blanks
parse_cookie|read_cookies; header|text; return~ the names and values in the cookie header {0}
is_ip_address|valid_ipv4; text|address; check~ that {0} consists of four numbers from 0 to 255 with dots between them
send_message|send_frame; sock|connection, data|payload; send~ the length of {1} as four bytes and then {1} itself
receive_exactly|read_fully; sock|connection, size|count; receive~ {1} bytes from {0} and raise~ EOFError if it closes too early
open_connection|connect_with_retry; host|server, port, attempts=3; connect~ a socket to {0} and try~ again after an error
pack_header|encode_header; kind|code, length|size; pack~ both numbers into bytes in network order
unpack_header|decode_header; data|buffer; read~ a two-byte code and a four-byte length from {0}
checksum|simple_checksum; data|payload; add~ up the bytes of {0} modulo 65536
hex_dump|show_bytes; data|buffer, width=16; return~ lines with the offset, the bytes in hex and the printable characters
decode_text|to_text; data|raw, encodings=('utf-8', 'latin-1'); try~ each of the encodings on {0} and return~ the first text that works
retry|call_with_retry; function|action, attempts|times=3, delay=0; call~ {0} up to {1} times until it raises nothing
memoize|cached; function|func; return~ a wrapper that remembers the results of {0} by its arguments
timed|measure_time; function|func; wrap~ {0} so that every call prints how long it took
compose|chain_functions; first|f, second|g; return~ a function that calls {1} on the result of {0}
call_once|only_once; function|action; return~ a wrapper that runs {0} at the first call only
deprecated|warn_deprecated; function|func, message|reason; wrap~ {0} so that it warns with {1} when called
debounce|limit_rate; function|callback, interval|seconds; ignore~ calls of {0} that come sooner than {1} after the last one
is_prime|prime; number|n; tell~ whether {0} has no divisor but one and itself
primes_below|sieve; limit|bound; return~ all primes smaller than {0} with a sieve
prime_factors|factorize; number|n; return~ the prime factors of {0} in ascending order
greatest_common_divisor|gcd_of; a|left, b|right; compute~ the greatest common divisor of {0} and {1}
least_common_multiple|lcm_of; a|left, b|right; return~ the smallest number that both {0} and {1} divide
fibonacci|fib; n|count; return~ the {0}th Fibonacci number without recursion
factorial_of|product_up_to; number|n; multiply~ the integers from one to {0} and raise~ ValueError for a negative one
binomial|choose; n|total, k|size; return~ the number of ways to choose {1} of {0} things
integer_root|isqrt_floor; number|n; return~ the largest integer whose square is at most {0}
power_mod|modular_power; base|x, exponent|k, modulus|m; compute~ {0} to the power {1} modulo {2} by repeated squaring
is_leap_year|leap; year|y; return~ True if {0} has 366 days
days_in_month|month_length; year, month|index; return~ the number of days of the month, minding leap years
weekday_name|name_of_day; date|day; return~ the English name of the weekday of {0}
next_weekday|next_business_day; date|start; return~ the first day after {0} that is not on a weekend
parse_duration|read_duration; text|value; turn~ a string such as 1h30m into seconds
format_duration|show_duration; seconds|total; write~ {0} as hours, minutes and seconds
parse_date|read_date; text|value, formats=('%Y-%m-%d', '%d.%m.%Y'); try~ each format on {0} and raise~ ValueError if none fits
age_in_years|full_years; birthday|born, today|now; return~ the number of whole years between {0} and {1}
compound_interest|grow_capital; amount|capital, rate|interest, years; return~ what {0} grows to after {2} at the yearly rate
round_to|round_to_step; value|number, step|unit; round~ {0} to the nearest multiple of {1}
linear_interpolate|mix; start|a, end|b, t|fraction; return~ the value that lies the part {2} of the way from {0} to {1}
polygon_area|area_of; points|vertices; compute~ the area of the polygon with the corners {0}
point_in_box|inside; point|position, box|rectangle; tell~ whether {0} lies within {1}, given as left, top, right and bottom
breadth_first|bfs; graph|edges, start|source; yield~ the nodes of {0} in the order of their distance from {1}
depth_first|dfs; graph|edges, start|node, seen=None; visit~ all nodes that can be reached from {1} and return~ them as a list
shortest_path|find_route; graph|roads, start|origin, goal|target; return~ the shortest list of nodes from {1} to {2}, or None
has_cycle|is_cyclic; graph|dependencies; return~ True if a chain of edges in {0} comes back to its start
topological_order|sort_dependencies; graph|dependencies; return~ the nodes of {0} so that each comes after what it depends on
tree_depth|height; node|root; return~ the number of levels below {0}, whose children are in node.children
balanced_brackets|check_brackets; text|expression; return~ True if every bracket in {0} is closed by the right one
evaluate_postfix|eval_rpn; tokens|expression; compute~ the value of {0}, in which operators follow their operands
tokenize_expression|split_tokens; text|expression; yield~ the numbers, names and operators in {0}
simulate_dice|roll_dice; count|dice, sides=6, rng=None; roll~ {0} dice and return~ the sum
random_password|make_password; length|size=12, alphabet=None; return~ a random string of {0} characters
convert_bool|parse_bool; value|text; return~ True or False for words such as yes and off, raising ValueError for others
validate_range|check_range; value|number, low|minimum, high|maximum; raise~ ValueError with a clear message unless {0} lies between {1} and {2}
safe_divide|divide_or; numerator|a, denominator|b, default=0.0; divide~ {0} by {1} and return~ {2} when that is impossible
""".strip().splitlines()
