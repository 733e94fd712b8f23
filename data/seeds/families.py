# ruff: noqa: E501  (a family is one line of text)
"""Families of functions and methods that are composed: a thing, one of its fields, and what is done with it.

Every family takes a `Draw` and returns a `Request`, whose name and description are drawn together
(`sort_flights_by_price`). Knows nothing of wordings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drawing import Draw


@dataclass(frozen=True)
class Request:
    """What is asked for: a function, or a method of `owner`; `does` has its verbs marked `~`, choices open."""

    name: str
    arguments: str
    does: str
    owner: str | None = None  # "a class Playlist that keeps its songs in self.songs"


# thing: its plural, then fields
THINGS: dict[str, tuple[str, ...]] = {
    "user": ("users", "name", "email", "country", "age"),
    "order": ("orders", "date", "price", "customer", "status"),
    "product": ("products", "price", "category", "weight", "code"),
    "employee": ("employees", "department", "salary", "name", "city"),
    "student": ("students", "grade", "school", "name", "score"),
    "message": ("messages", "sender", "date", "subject", "size"),
    "invoice": ("invoices", "number", "amount", "customer", "date"),
    "song": ("songs", "artist", "album", "length", "year"),
    "recipe": ("recipes", "author", "time", "title", "kind"),
    "city": ("cities", "country", "population", "name", "region"),
    "flight": ("flights", "airline", "price", "origin", "gate"),
    "book": ("books", "author", "year", "publisher", "title"),
    "car": ("cars", "color", "owner", "model", "speed"),
    "patient": ("patients", "doctor", "age", "room", "name"),
    "task": ("tasks", "priority", "owner", "deadline", "state"),
    "event": ("events", "date", "kind", "place", "source"),
    "comment": ("comments", "author", "score", "date", "topic"),
    "packet": ("packets", "source", "length", "protocol", "port"),
    "image": ("images", "width", "format", "owner", "size"),
    "session": ("sessions", "user", "start", "token", "address"),
    "rule": ("rules", "name", "weight", "action", "target"),
    "player": ("players", "team", "score", "level", "name"),
    "sensor": ("sensors", "location", "value", "unit", "id"),
    "job": ("jobs", "queue", "priority", "worker", "state"),
    "node": ("nodes", "depth", "label", "parent", "weight"),
    "movie": ("movies", "director", "rating", "year", "genre"),
}
CONDITIONS = {  # adjective: how it is said of a plural
    "even": "numbers", "odd": "numbers", "negative": "numbers", "positive": "values", "empty": "lines", "long": "words",
    "short": "names", "unique": "values", "repeated": "words", "missing": "keys", "hidden": "files", "blank": "rows",
    "broken": "links", "unused": "names", "finite": "values", "numeric": "fields", "quoted": "strings", "upper_case": "words",
}  # fmt: skip
UNITS = (
    ("celsius", "fahrenheit"), ("feet", "meters"), ("miles", "kilometers"), ("pounds", "kilograms"),
    ("gallons", "liters"), ("hours", "seconds"), ("days", "minutes"), ("degrees", "radians"), ("bytes", "megabytes"),
    ("inches", "centimeters"), ("knots", "kilometers_per_hour"), ("rgb", "hex"), ("seconds", "minutes"),
)  # fmt: skip
HOLDERS = (  # class, item, plural (an attribute that is a list)
    ("Playlist", "song", "songs"), ("Cart", "product", "products"), ("Stack", "value", "values"),
    ("Polygon", "point", "points"), ("Schedule", "task", "tasks"), ("Deck", "card", "cards"),
    ("Route", "stop", "stops"), ("Classroom", "student", "students"), ("Logger", "handler", "handlers"),
    ("Album", "photo", "photos"), ("Team", "player", "players"), ("Menu", "entry", "entries"),
    ("Pipeline", "stage", "stages"), ("Mailbox", "message", "messages"), ("Tree", "child", "children"),
)  # fmt: skip
TABLES = (  # class, item, plural (an attribute that is a dict)
    ("Inventory", "item", "items"), ("Cache", "entry", "entries"), ("Config", "option", "options"),
    ("Registry", "handler", "handlers"), ("Dictionary", "word", "words"), ("Graph", "node", "nodes"),
    ("Scoreboard", "score", "scores"), ("Headers", "header", "headers"), ("Bank", "account", "accounts"),
    ("Router", "route", "routes"), ("Translator", "phrase", "phrases"), ("Catalog", "product", "products"),
)  # fmt: skip


def over_records(d: Draw) -> Request:
    """Something done with a list of dicts, by one of their fields."""
    thing = d.rng.choice(sorted(THINGS))
    many, *fields = THINGS[thing]
    key, other = d.some(fields, 2)
    return d.pick(
        Request(f"sort_{many}_by_{key}", f"{many}, reverse=False", f"return~ the {many} [sorted|ordered] by their {key}"),
        Request(f"group_{many}_by_{key}", many, f"return~ a dict that maps [each|every] {key} to the list of {many} that have it"),
        Request(f"index_{many}_by_{key}", many, f"build~ a dict from {key} to {thing} and raise~ KeyError if a {key} comes twice"),
        Request(f"count_{many}_by_{key}", many, f"count~ how many {many} there are for each {key}"),
        Request(f"find_{thing}_by_{key}", f"{many}, {key}", f"return~ the first of the {many} with the given {key}, or None"),
        Request(f"filter_{many}_by_{key}", f"{many}, {key}", f"return~ [only the|a list of the] {many} whose {key} is equal to the given one"),
        Request(f"load_{many}", d.pick("path", "filename"), f"read~ a [JSON|CSV] file and return~ the {many} in it as a list of dicts"),
        Request(f"save_{many}", f"{many}, {d.pick('path', 'filename')}", f"write~ the {many} to a file, one JSON object a line"),
        Request(f"validate_{thing}", thing, f"raise~ ValueError if the {key} or the {other} of the {thing} is missing or empty"),
        Request(f"parse_{thing}_line", "line", f"split~ a line at its commas and return~ a dict with the {key} and the {other} of the {thing}"),
        Request(f"format_{thing}", f"{thing}", f"return~ a line of text with the {key} and the {other} of a {thing}"),
        Request(f"drop_{many}_without_{key}", many, f"return~ the {many} except those that have no {key}"),
        Request(f"merge_{thing}_lists", "first, second", f"join~ two lists of {many}, keeping one {thing} for every {key}"),
        Request(f"unique_{thing}_{key}_values", many, f"return~ the sorted set of all {key} values that the {many} have"),
        Request(f"print_{many}", f"{many}, file=None", f"print~ {key} and {other} of each {thing} on a line of its own"),
        Request(f"compare_{many}_by_{key}", "left, right", f"return~ a negative number, zero or a positive one as the {key} of the {thing} left is smaller, equal or larger"),
        Request(f"update_{thing}_{key}", f"{thing}, {key}", f"store~ a new {key} in the {thing} and return~ the old one"),
        Request(f"copy_{thing}_without_{key}", thing, f"return~ a copy of the {thing} that has everything but its {key}"),
    )  # fmt: skip


def over_conditions(d: Draw) -> Request:
    """Something done with the elements that are even, empty, hidden, ..."""
    adjective = d.rng.choice(sorted(CONDITIONS))
    noun, said = CONDITIONS[adjective], adjective.replace("_", "-")
    return d.pick(
        Request(f"count_{adjective}_{noun}", noun, f"count~ the {said} {noun} in a list"),
        Request(f"keep_{adjective}_{noun}", noun, f"return~ a list of the {said} {noun} only"),
        Request(f"skip_{adjective}_{noun}", noun, f"yield~ all {noun} but the {said} ones"),
        Request(f"first_{adjective}_{noun[:-1]}", f"{noun}, default=None", f"return~ the first of the {noun} that is {said}, or the default"),
        Request(f"split_{adjective}_{noun}", noun, f"return~ two lists, the {said} {noun} and all the others"),
        Request(f"positions_of_{adjective}_{noun}", noun, f"return~ the indexes at which {said} {noun} stand"),
        Request(f"has_{adjective}_{noun}", noun, f"tell~ whether any of the {noun} is {said}"),
        Request(f"replace_{adjective}_{noun}", f"{noun}, replacement", f"return~ a copy of {noun} with the {said} ones replaced"),
    )  # fmt: skip


def over_units(d: Draw) -> Request:
    """A conversion between two units, of one value or a list."""
    a, b = d.rng.choice(UNITS)
    if d.rng.random() < 0.5:
        a, b = b, a
    x, y = a.replace("_", " "), b.replace("_", " ")
    return d.pick(
        Request(f"{a}_to_{b}", d.pick("value", a), f"convert~ a value from {x} to {y}"),
        Request(f"convert_{a}_list_to_{b}", "values", f"return~ a list with each value converted from {x} to {y}"),
        Request(f"format_{a}_as_{b}", f"value, {d.pick('digits=1', 'precision=2')}", f"convert~ {x} to {y} and return~ the result as text with its unit"),
    )  # fmt: skip


def list_method(d: Draw) -> Request:
    """A method of a class that holds a list."""
    owner, item, many = d.rng.choice(HOLDERS)
    attribute = f"self.{many}"
    said = d.pick(
        f"a class {owner} that keeps its {many} in {attribute}",
        f"the class {owner}, whose {many} are the list {attribute}",
    )
    name, arguments, does = d.pick(
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
        ("__add__", "self, other", f"return~ a new {owner} with the {many} of both"),
        ("to_dict", "self", f"return~ a dict with the name of the class and the {many} as a list"),
    )  # fmt: skip
    return Request(name, arguments, does, said)


def table_method(d: Draw) -> Request:
    """A method of a class that holds a dict."""
    owner, item, many = d.rng.choice(TABLES)
    attribute = f"self.{many}"
    said = d.pick(
        f"a class {owner} with a dict {attribute}", f"my {owner} class, which stores its {many} by name in {attribute}"
    )
    name, arguments, does = d.pick(
        (f"get_{item}", "self, name, default=None", f"return~ the {item} of that name, or the default"),
        (f"set_{item}", f"self, name, {item}", f"store~ the {item} under its name and return~ the one it replaces"),
        (f"delete_{item}", "self, name", f"delete~ the {item} and raise~ KeyError with a clear message if there is none"),
        (f"rename_{item}", "self, old, new", f"give~ a {item} another name, refusing a name that is taken"),
        (f"has_{item}", "self, name", f"tell~ whether there is a {item} of that name"),
        (f"count_{many}", "self, prefix=''", f"count~ the {many} whose names begin with the prefix"),
        (f"update_{many}", "self, other", f"copy~ all {many} of another {owner} into this one"),
        (f"{item}_names", "self", f"return~ the names of all {many}, sorted"),
        (f"load_{many}", "self, path", f"read~ {attribute} from a JSON file"),
        (f"save_{many}", "self, path", f"write~ {attribute} to a JSON file"),
        (f"expire_{many}", "self, now", f"remove~ the {many} whose time lies before now"),
        (f"require_{item}", "self, name", f"return~ the {item}, raising LookupError if it is unknown"),
        ("__getitem__", "self, name", f"return~ the {item} called name"),
        ("__setitem__", f"self, name, {item}", f"store~ the {item} after checking that the name is a string"),
        ("__delitem__", "self, name", f"remove~ the {item} called name"),
        ("__str__", "self", f"return~ one line for each of the {many}"),
        ("from_dict", "cls, data", f"create~ a {owner} whose {many} come from a dict"),
        ("copy", "self", f"return~ another {owner} with the same {many}"),
    )  # fmt: skip
    return Request(name, arguments, does, said)


FAMILIES: tuple[tuple[Callable[[Draw], Request], int], ...] = (  # with their weights
    (over_records, 12), (over_conditions, 6), (over_units, 2), (list_method, 7), (table_method, 6),
)  # fmt: skip
