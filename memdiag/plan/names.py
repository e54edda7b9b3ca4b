"""What plans are called. Imports nothing, since a process that starts a script must not import NumPy first."""

from __future__ import annotations

BARE = "none"
EVERY_BLOCK = "every_block"
USUAL = {1: EVERY_BLOCK, 2: "every_2nd_block", 3: "every_3rd_block"}
"""Of each block, each second one…"""
FRONTIER = "frontier_"
"""With a number after it."""
WITHIN_BUDGET = "within_budget"
BY_HAND = "by_hand"


def may_be(name: str) -> bool:
    """Whether a plan of some run may have the name.

    >>> may_be("every_2nd_block"), may_be("frontier_12"), may_be("frontier_"), may_be("every_4th_block")
    (True, True, False, False)
    """
    number = name.removeprefix(FRONTIER)
    return name in (BARE, *USUAL.values(), WITHIN_BUDGET, BY_HAND) or number != name and number.isdecimal()


def listed() -> str:
    """The names that can be asked for, in a line; what fits a budget is asked for by the budget."""
    return ", ".join((BARE, *USUAL.values(), f"{FRONTIER}1 and so on", BY_HAND))
