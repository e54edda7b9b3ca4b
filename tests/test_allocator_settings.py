from __future__ import annotations

import subprocess
import sys

import pytest

from memdiag.allocator import Settings
from memdiag.allocator.rules import MIB
from memdiag.allocator.settings import UNLIMITED
from memdiag.errors import MemdiagError

TAKEN = [
    "", "max_split_size_mb:20", "max_split_size_mb:128,", " expandable_segments : True ", "max_split_size_mb:128MB",
    "max_split_size_mb:64.9", "max_split_size_mb:-1", "max_split_size_mb:64,max_split_size_mb:128",
    "large_segment_size_mb:11", "large_segment_size_mb:200", "max_non_split_rounding_mb:20",
    "garbage_collection_threshold:0.5x", "roundup_power2_divisions:4", "roundup_power2_divisions:1",
    "roundup_power2_divisions:[256:1,512:2,>:4]",
    "roundup_power2_divisions:[>:4]", "roundup_power2_divisions:[]", "roundup_power2_divisions:[256:1,]",
    "roundup_power2_divisions:[1:0,2:0,131072:4]", "pinned_use_background_threads:True",
    "large_segment_size_mb:100,max_split_size_mb:100",
]
REFUSED = [
    "max_split_size_mb:19", "large_segment_size_mb:10", "max_non_split_rounding_mb:19",
    "garbage_collection_threshold:0", "garbage_collection_threshold:1", "garbage_collection_threshold:nan",
    "expandable_segments:true",
    "roundup_power2_divisions:3", "roundup_power2_divisions:0", "roundup_power2_divisions:[256:1",
    "roundup_power2_divisions:[256:3]", "roundup_power2_divisions:[100:4]", "roundup_power2_divisions:[0:4]",
    "roundup_power2_divisions:[256:1 512:2]", "max_split_size_mb", "max_split_size_mb:", "max_split_size_mb:abc",
    "max_split_size_mb:[128]", "max_split_size_mb:99999999999999999999999", "expandable_segments=True",
    "max_split_size_mb 128", "expandable_segments:True expandable_segments:True", "max_split_size_mb:1.5",
    "max_split_size_mb:128;expandable_segments:True", "max_split_size_mb:50,large_segment_size_mb:100",
]

ASK_TORCH = """
import sys
import torch
for conf in sys.argv[1:]:
    try:
        torch._C._accelerator_setAllocatorSettings(conf)
        print("taken")
    except (ValueError, RuntimeError, IndexError):
        print("refused")
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
"""


def test_what_torch_takes_is_taken_and_what_it_refuses_is_refused() -> None:
    # GIVEN texts, and what the parser of the installed PyTorch says to each
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip("this version of PyTorch parses the settings of CUDA alone")
    command = [sys.executable, "-c", ASK_TORCH, *TAKEN, *REFUSED]
    asked = subprocess.run(command, capture_output=True, text=True, check=True)
    said = dict(zip([*TAKEN, *REFUSED], asked.stdout.split(), strict=True))

    # WHEN we parse them
    def ours(conf: str) -> str:
        try:
            Settings.parse(conf)
        except MemdiagError:
            return "refused"
        return "taken"

    # THEN we say the same
    assert {conf: ours(conf) for conf in said} == said


@pytest.mark.parametrize("conf", TAKEN)
def test_taken(conf: str) -> None:
    Settings.parse(conf)


@pytest.mark.parametrize(("conf", "why"), [
    ("max_split_size_mb:19", "max_split_size_mb is '19', but must be 20 or more"),
    ("large_segment_size_mb:10", "must be more than 10"),
    ("garbage_collection_threshold:1", "must be more than 0 and less than 1"),
    ("per_process_memory_fraction:1.5", "must be from 0 to 1"),
    ("expandable_segments:true", "must be True or False"),
    ("backend:cudaMallocAsync", "other allocators than PyTorch's own are not modelled"),
    ("expandable_segment:True", "'expandable_segment' is none of PyTorch's settings"),
    ("max_split_size_mb:128,,expandable_segments:True", "',' has no value"),
    ("expandable_segments", "'expandable_segments' has no value"),
    ("expandable_segments:True:False", "there is no comma after the value of 'expandable_segments'"),
    ("roundup_power2_divisions:[256:1", "has no closing bracket"),
    ("roundup_power2_divisions:[256]", "must be a list of size:divisions pairs"),
    ("roundup_power2_divisions:[256:3]", "must have powers of two"),
])
def test_one_message_says_what_is_wrong(conf: str, why: str) -> None:
    with pytest.raises(MemdiagError) as error:
        Settings.parse(conf)
    assert why in str(error.value)
    assert repr(conf) in str(error.value)
    assert "\n" not in str(error.value)


def test_values() -> None:
    assert Settings.parse("") == Settings()
    assert Settings().max_split_size == UNLIMITED == 2**64 - 1
    found = Settings.parse("expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.75,"
                           "per_process_memory_fraction:0.5,large_segment_size_mb:64,backend:native")
    assert found == Settings(max_split_size=128 * MIB, max_non_split_rounding=64 * MIB, large_segment_size=64 * MIB,
                             garbage_collection_threshold=0.75, expandable_segments=True, memory_fraction=0.5)


@pytest.mark.parametrize(("conf", "divisions"), [
    ("4", {1: 4, MIB: 4, 1 << 40: 4}),
    ("[256:1,512:2,>:4]", {1: 1, 255 * MIB: 1, 256 * MIB: 1, 511 * MIB: 1, 512 * MIB: 2, 1023 * MIB: 2, 1024 * MIB: 4,
                           1 << 40: 4}),
    ("[4:8,32:2]", {1: 8, 4 * MIB: 8, 8 * MIB: 0, 31 * MIB: 0, 32 * MIB: 2, 64 * MIB: 0}),
    ("[131072:4]", {MIB: 4, 1 << 34: 4, 1 << 35: 4}),  # sizes above the last bucket count as the last
])
def test_divisions_by_size(conf: str, divisions: dict[int, int]) -> None:
    found = Settings.parse(f"roundup_power2_divisions:{conf}")
    assert {size: found.divisions(size) for size in divisions} == divisions


def test_from_a_snapshot() -> None:
    # GIVEN the settings of a snapshot, with a key that only a later version knows
    fields = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64,new_thing:[a:b],"
                                         "large_segment_size_mb:32,per_process_memory_fraction:0.5",
              "max_split_size": 64 * MIB, "garbage_collection_threshold": 0.5, "expandable_segments": True,
              "release_lock_on_cudamalloc": False,
              "roundup_power2_divisions": {str(1 << bucket): bucket % 2 * 4 for bucket in range(16)}}

    # WHEN they are read
    found = Settings.from_snapshot(fields)

    # THEN its fields and its text count
    assert found == Settings(max_split_size=64 * MIB, max_non_split_rounding=32 * MIB, large_segment_size=32 * MIB,
                             roundup_power2_divisions=(0, 4) * 8, garbage_collection_threshold=0.5,
                             expandable_segments=True, memory_fraction=0.5)


def test_a_snapshot_without_settings_or_limits() -> None:
    assert Settings.from_snapshot(None) == Settings()
    assert Settings.from_snapshot({"max_split_size": -1}) == Settings()
    assert Settings.from_snapshot({"PYTORCH_CUDA_ALLOC_CONF": "what:[is"}) == Settings()


@pytest.mark.parametrize("fields", [{"max_split_size": "much"}, {"roundup_power2_divisions": [1, 2]},
                                    {"garbage_collection_threshold": None}, {"PYTORCH_CUDA_ALLOC_CONF": 5}])
def test_a_snapshot_with_other_things_in_its_settings(fields: dict[str, object]) -> None:
    with pytest.raises(MemdiagError, match="allocator_settings cannot be read"):
        Settings.from_snapshot(fields)
