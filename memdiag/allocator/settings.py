"""What can be set of PyTorch's caching allocator, as ``PYTORCH_ALLOC_CONF`` says it.

``PYTORCH_CUDA_ALLOC_CONF`` is the older name of the same; where both are set, PyTorch reads the older one. Sources:
``c10/core/AllocatorConfig.h`` and ``.cpp``, ``c10/cuda/CUDAAllocatorConfig.h`` and ``.cpp``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from memdiag.errors import MemdiagError

MIB = 1 << 20
UNLIMITED = (1 << 64) - 1
"""What PyTorch has for a size without a limit: the largest that a C ``size_t`` holds."""

BUCKETS = 16
"""Of sizes, for rounding to parts of powers of two: below 2 MiB, to 4 MiB, and so on; the last is from 32 GiB on."""

NO_ROUNDING = (0,) * BUCKETS
_LARGEST_SMALL_SEGMENT_MB = 10  # a large segment must be larger than what has a segment to itself


@dataclass(frozen=True)
class Settings:
    """The settings that decide where a request is put.

    Attributes:
        max_split_size: blocks of at least so many bytes are never split, and go to requests of at least as many alone.
        max_non_split_rounding: a request of ``max_split_size`` or more takes no free block that is larger by so many
            bytes or more.
        roundup_power2_divisions: for each of ``BUCKETS`` buckets of sizes, into how many equal parts the way from one
            power of two to the next is divided; a size is rounded up to the end of its part. 0 or 1: it is not.
        garbage_collection_threshold: the part of the limit above which old free segments are given back before a
            new one is asked for; 0 for never. It works only where there is a limit.
        expandable_segments: whether segments are virtual ranges that grow.
        large_segment_size: bytes of a segment for requests from 1 MiB to 10 MiB, and of a page of an expandable one.
        memory_fraction: the part of the device's memory that may be reserved; 1 for no limit.
    """

    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = NO_ROUNDING
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment_size: int = 20 * MIB
    memory_fraction: float = 1.0

    @classmethod
    def parse(cls, conf: str) -> Settings:
        """From what ``PYTORCH_ALLOC_CONF`` holds: ``key:value`` pairs with commas between them.

        Keys that concern pinned memory, locks or graphs alone are allowed and change nothing here. As in PyTorch, the
        last of equal keys counts, and what follows a number is not looked at: ``128MB`` is 128.

        Raises:
            MemdiagError: for a key or a value that PyTorch would not take, and for another allocator's backend.
        """
        return _read(conf, list(_items(conf, strict=True)), _IGNORED_KEYS)

    @classmethod
    def from_snapshot(cls, settings: Mapping[str, Any] | None) -> Settings:
        """From the ``allocator_settings`` of a memory snapshot; the default ones where it has none.

        What has a field of its own is taken from there, the rest from the text that PyTorch was given. PyTorch has
        taken that text, so keys unknown here are of a later version and passed over.

        Raises:
            MemdiagError: when a field is not of the kind that PyTorch writes.
        """
        if settings is None:
            return cls()
        conf = settings.get("PYTORCH_CUDA_ALLOC_CONF") or settings.get("PYTORCH_ALLOC_CONF") or ""
        wanted = ("large_segment_size_mb", "max_non_split_rounding_mb", "per_process_memory_fraction")
        try:
            found = _read(conf, [item for item in _items(conf, strict=False) if item[0] in wanted], frozenset())
            return _with_fields(found, settings)
        except (TypeError, ValueError, AttributeError) as error:
            raise MemdiagError(f"the snapshot's allocator_settings cannot be read: {error}") from error

    def divisions(self, size: int) -> int:
        """How many parts the powers of two around a size of so many bytes are divided into."""
        return self.roundup_power2_divisions[min(max(size.bit_length() - 21, 0), BUCKETS - 1)]


def _with_fields(found: Settings, fields: Mapping[str, Any]) -> Settings:
    changes: dict[str, Any] = {}
    if "max_split_size" in fields:
        limit = int(fields["max_split_size"])
        changes["max_split_size"] = limit if limit >= 0 else UNLIMITED  # -1 is the unsigned maximum, printed signed
    if "garbage_collection_threshold" in fields:
        changes["garbage_collection_threshold"] = float(fields["garbage_collection_threshold"])
    if "expandable_segments" in fields:
        changes["expandable_segments"] = bool(fields["expandable_segments"])
    if "roundup_power2_divisions" in fields:
        buckets = {int(start): int(parts) for start, parts in fields["roundup_power2_divisions"].items()}
        changes["roundup_power2_divisions"] = tuple(buckets.get(1 << number, 0) for number in range(BUCKETS))
    return replace(found, **changes)


_Item = tuple[str, list[str]]


def _items(conf: str, strict: bool) -> Iterator[_Item]:
    """Keys with the tokens of their values, a list's brackets included; all without spaces."""
    tokens = [token for token in re.split(r"([,:\[\]])", re.sub(r"\s", "", conf)) if token]
    at = 0
    while at < len(tokens):
        key, value = tokens[at], tokens[at + 2:at + 3]
        if tokens[at + 1:at + 2] != [":"] or not value:
            if not strict:
                return
            _refuse(conf, f"{key!r} has no value; write key:value pairs with commas between them")
        at += 3
        if value == ["["]:
            if "]" not in tokens[at:]:
                if not strict:
                    return
                _refuse(conf, f"the list of {key!r} has no closing bracket")
            end = tokens.index("]", at)
            value = tokens[at - 1:end + 1]
            at = end + 1
        yield key, value
        if at < len(tokens) and tokens[at] != ",":
            if not strict:
                return
            _refuse(conf, f"there is no comma after the value of {key!r}")
        at += 1


def _refuse(conf: str, why: str) -> NoReturn:
    raise MemdiagError(f"PYTORCH_ALLOC_CONF={conf!r} is not understood: {why}")


class _Wrong(Exception):
    """What is wrong with a value."""


_FIELDS: dict[str, str] = {
    "max_split_size_mb": "max_split_size",
    "max_non_split_rounding_mb": "max_non_split_rounding",
    "roundup_power2_divisions": "roundup_power2_divisions",
    "garbage_collection_threshold": "garbage_collection_threshold",
    "expandable_segments": "expandable_segments",
    "per_process_memory_fraction": "memory_fraction",
}
_IGNORED_KEYS = frozenset({
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads", "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb",
    "pinned_free_catch_all", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
    "expandable_segments_reserve", "expandable_segments_reserve_by_class",
})


def _read(conf: str, items: list[_Item], ignored: frozenset[str]) -> Settings:
    large = Settings.large_segment_size
    # The size of large segments is read first, wherever it stands: it is what others are held against, and the default
    # of one of them.
    for key, value in items:
        if key == "large_segment_size_mb":
            large = _checked(conf, key, value, _large_segment_size)
    values: dict[str, Any] = {"large_segment_size": large, "max_non_split_rounding": large}
    for key, value in items:
        if key == "backend":
            _checked(conf, key, value, _backend)
        elif key in _FIELDS:
            values[_FIELDS[key]] = _checked(conf, key, value, _reader(key, large))
        elif key != "large_segment_size_mb" and key not in ignored:
            _refuse(conf, f"{key!r} is none of PyTorch's settings of the allocator")
    return Settings(**values)


def _reader(key: str, large: int) -> Callable[[list[str]], Any]:
    readers: dict[str, Callable[[list[str]], Any]] = {
        "roundup_power2_divisions": _divisions,
        "garbage_collection_threshold": _threshold,
        "expandable_segments": _flag,
        "per_process_memory_fraction": _fraction,
    }
    return readers.get(key) or (lambda value: _megabytes(value, large // MIB))


def _checked(conf: str, key: str, value: list[str], read: Callable[[list[str]], Any]) -> Any:
    try:
        return read(value)
    except _Wrong as wrong:
        raise MemdiagError(
            f"PYTORCH_ALLOC_CONF={conf!r} is not understood: {key} is {''.join(value)!r}, but {wrong}") from None


def _whole(token: str) -> int:
    """As C's ``stoull`` reads it: digits at the start; a negative number counts down from 2**64."""
    match = re.match(r"[+-]?[0-9]+", token)
    if match is None or abs(int(match[0])) > UNLIMITED:
        raise _Wrong("must be a whole number")
    return int(match[0]) % (UNLIMITED + 1)


def _real(token: str) -> float:
    match = re.match(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", token)
    if match is None:
        raise _Wrong("must be a number")
    return float(match[0])


def _megabytes(value: list[str], least: int) -> int:
    megabytes = _whole(value[0])
    if megabytes < least:
        raise _Wrong(f"must be {least} or more, as many MiB as a large segment has")
    return min(megabytes, UNLIMITED // MIB) * MIB


def _large_segment_size(value: list[str]) -> int:
    megabytes = _whole(value[0])
    if megabytes <= _LARGEST_SMALL_SEGMENT_MB:
        raise _Wrong(f"must be more than {_LARGEST_SMALL_SEGMENT_MB}")
    return min(megabytes, UNLIMITED // MIB) * MIB


def _threshold(value: list[str]) -> float:
    threshold = _real(value[0])
    if not 0 < threshold < 1:
        raise _Wrong("must be more than 0 and less than 1")
    return threshold


def _fraction(value: list[str]) -> float:
    fraction = _real(value[0])
    if not 0 <= fraction <= 1:
        raise _Wrong("must be from 0 to 1")
    return fraction


def _flag(value: list[str]) -> bool:
    if value not in (["True"], ["False"]):
        raise _Wrong("must be True or False")
    return value == ["True"]


def _backend(value: list[str]) -> None:
    if value != ["native"]:
        raise _Wrong("must be native: other allocators than PyTorch's own are not modelled")


def _power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _divisions(value: list[str]) -> tuple[int, ...]:
    """One number for all sizes, or a list as in ``[256:1,512:2,>:4]``: each with the size in MiB at which it begins.

    The first of a list goes for smaller sizes also, ``>`` for all above the one before it. Buckets in between that the
    list does not name are not rounded.
    """
    if value[0] != "[":
        parts = _whole(value[0])
        if not _power_of_two(parts):
            raise _Wrong("must be a power of two")
        return (parts,) * BUCKETS
    found, last, first = list(NO_ROUNDING), 0, True
    for start, parts in _pairs(value[1:-1]):
        if parts and not _power_of_two(parts):
            raise _Wrong("must have powers of two, or 0 for no rounding")
        if start == ">":
            found[last + 1:] = [parts] * (BUCKETS - last - 1)
            continue
        size = _whole(start)
        if not _power_of_two(size):
            raise _Wrong("must name sizes that are powers of two")
        last = min(size.bit_length() - 1, BUCKETS - 1)
        if first:
            found[:last], first = [parts] * last, False
        found[last] = parts
    return tuple(found)


def _pairs(tokens: list[str]) -> Iterator[tuple[str, int]]:
    while tokens:
        if len(tokens) < 3 or tokens[1] != ":" or tokens[3:4] not in ([], [","]):
            raise _Wrong("must be a list of size:divisions pairs, as in [256:1,512:2,>:4]")
        yield tokens[0], _whole(tokens[2])
        tokens = tokens[4:]
