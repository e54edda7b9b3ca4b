"""Repeated blocks as one name: ``blocks.0.mlp``, ``blocks.1.mlp``… become ``blocks.0-1.mlp``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable


def fold(paths: Iterable[str]) -> dict[str, str]:
    """The name under which each path is shown together with its like.

    Paths fold where they differ in one index; several indices fold together only where every combination is there,
    so a folded name never stands for a path that was not given.

    >>> fold(["blocks.0.fc", "blocks.1.fc", "blocks.2.fc", "head"])["blocks.1.fc"]
    'blocks.0-2.fc'
    >>> fold(["a.0", "a.1", "a.4"])["a.4"]
    'a.0-1,4'
    >>> sorted(set(fold(["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1", "a.2.b.0"]).values()))
    ['a.0-1.b.0-1', 'a.2.b.0']
    """
    names = {path: path.split(".") for path in paths}
    depth = max((len(parts) for parts in names.values()), default=0)
    # The innermost index first: outer ones then fold exactly where all that lies below them is alike.
    for place in reversed(range(depth)):
        alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for path, parts in names.items():
            if place < len(parts) and _is_index(parts[place]):
                alike[(*parts[:place], "", *parts[place + 1 :])].append(path)
        for group in alike.values():
            indices = ranges(int(names[path][place]) for path in group)
            for path in group:
                names[path][place] = indices
    return {path: ".".join(parts) for path, parts in names.items()}


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in short.

    >>> ranges([5, 0, 1, 2, 9, 10])
    '0-2,5,9-10'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def shorten(text: str, width: int) -> str:
    """Text that fits, with its middle left out: the ends of a path tell most.

    >>> shorten("model.layers.0-31.self_attn.o_proj", 20)
    'model.laye…tn.o_proj'
    """
    return _cut(text, width, (width - 1) // 2)


def shorten_apart(texts: Iterable[str], width: int) -> dict[str, str]:
    """Each text as it fits, with something else than its middle left out where two would become the same.

    >>> list(shorten_apart(["layers.0.mlp.up.weight", "layers.1.mlp.up.weight"], 12).values())
    ['layers.0…ght', 'layers.1…ght']
    """
    alike: dict[str, list[str]] = defaultdict(list)
    for text in dict.fromkeys(texts):
        alike[shorten(text, width)].append(text)
    found: dict[str, str] = {group[0]: short for short, group in alike.items() if len(group) == 1}
    for group in alike.values():
        if len(group) > 1:
            found.update(_apart(group, width, set(found.values())))
    return found


def _apart(texts: list[str], width: int, taken: set[str]) -> dict[str, str]:
    for tail in sorted(range(width), key=lambda tail: abs(tail - (width - 1) // 2)):
        found = {text: _cut(text, width, tail) for text in texts}
        if len(set(found.values()) - taken) == len(texts):
            return found
    # They differ in several far places: no cut shows all of that.
    marks = {text: f" ({number})" for number, text in enumerate(texts, 1)}
    return {text: shorten(text, width - len(mark)) + mark for text, mark in marks.items()}


def _cut(text: str, width: int, tail: int) -> str:
    if len(text) <= width:
        return text
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdecimal() and str(int(part)) == part
