"""The three ways in which describe/ and split/ say no.

A description may not cover a call (the Op runs unsplit), may be wrong (its author must know), or
may not allow a cut (a search tries another one).
"""

from __future__ import annotations

from apportion.describe.descriptions import Description


class IllegalCut(Exception):
    """A cut is not legal; the message says why."""


class Undescribed(Exception):
    """The description does not cover this call; the Op runs unsplit. The message says why."""


class BadDescription(ValueError):
    """A description that cannot be right; the message names the operator and the line."""


def bad_description(description: Description, what: str) -> BadDescription:
    """The error that says what is wrong with a description."""
    return BadDescription(f"{description.kind} is {description.where}, but {what}")
