"""The user's function that makes new elements of what was added up, for many elements at once.

Part of the room loops. The source of a function of (element, sum, *state) comes in; out goes a
compiled loop over the rows of a part, which calls it for every element to which something was
added.
"""

from __future__ import annotations

from collections.abc import Callable

from apportion.loops.compile_kernel import compile_text
from apportion.loops.kernel_text import OWN, preamble
from apportion.loops.loop_body import FreeNames, HelperSource
from apportion.loops.loop_plan import ArrayUse

Apply = Callable[..., None]


def compile_apply(use: ArrayUse) -> Apply | None:
    """The compiled loop for an array that is updated; None for any other."""
    if use.apply is None:
        return None
    found: Apply = compile_text(apply_text(use.apply, len(use.state)))
    return found


def apply_text(function: HelperSource, states: int) -> str:
    """The text of the loop: rows[where[k]] gets what was added in added[k]; all are in two dims."""
    names = [f"s{k}" for k in range(states)]
    element = ["rows[r, c]", *(f"{name}[r, c]" for name in names)]
    given = ", ".join(["rows[r, c]", "added[k, c]", *(f"{name}[r, c]" for name in names)])
    lines = [
        *preamble(FreeNames(helpers={function.name: function})),
        f"def {OWN}tile({', '.join(['rows', 'where', 'added', *names])}):",
        "    for k in range(len(where)):",
        "        r = where[k]",
        "        for c in range(added.shape[1]):",
        "            if added[k, c] != 0:",
        f"                {', '.join(element)} = {function.name}({given})",
    ]
    return "\n".join(lines) + "\n"
