"""PyTorch's CUDA caching allocator as a model: which request lands where, what is reserved, and what does not fit."""

from memdiag.allocator.driver import AddressSpace, Driver
from memdiag.allocator.model import Allocator
from memdiag.allocator.settings import Settings
from memdiag.allocator.state import BlockState, Event, OutOfMemory, RangeState, SegmentState

__all__ = ["AddressSpace", "Allocator", "BlockState", "Driver", "Event", "OutOfMemory", "RangeState", "SegmentState",
           "Settings"]
