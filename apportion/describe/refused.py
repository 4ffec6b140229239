"""Refused: the exception for a cut that is not legal. Described operators and splits raise it."""

from __future__ import annotations


class Refused(Exception):
    """A cut is not legal; the message says why."""
