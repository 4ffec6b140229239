"""adapters: the training loops of other libraries, with a divided step inside.

In: a Trainer of transformers or of Lightning as people write it, and a plan. Out: the same training
on the ranks of a torchrun job. Batches are whole on every rank, the live model is brought up to
date whenever the library evaluates or saves it, and rank 0 speaks for all.
Read divided_step.py first (a step that is captured when the first batch comes), then
hugging_face.py and lightning.py. Each needs its library, which is an extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    pass  # no other room needs it; users import its modules

lazy_face(__name__)
