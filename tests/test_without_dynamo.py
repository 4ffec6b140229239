"""torch's compiler stays unloaded while steps are captured, and works when it is asked for.

In processes of their own: what is loaded cannot be unloaded.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

BEFORE = """
import sys
from apportion import zoo
from apportion.capture import capture
it = zoo.load("mlp:tiny", 0, meta=True)
capture(it.step, it.model, it.optimizer, it.batch)
import torch
assert type(sys.modules["torch._dynamo"]).__name__ == "_UnloadedPackage"
assert "torch._dynamo.eval_frame" not in sys.modules
asked = torch.optim.Optimizer.add_param_group.__wrapped__
assert getattr(asked, "__dynamo_disable") is asked
"""

AFTER = """
assert type(torch._dynamo).__name__ == "module" and torch._dynamo is sys.modules["torch._dynamo"]
it.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
assert getattr(asked, "__dynamo_disable") is not asked
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        "assert torch.compile(lambda x: 2 * x, backend='eager')(torch.ones(2)).sum() == 4.0",
        "from torch._dynamo.source import ConstantSource",
        "import torch._dynamo.utils",
        "from torch._dynamo import *",
        "torch._dynamo.reset()",
    ],
)
def test_the_compiler_is_loaded_when_it_is_used(use: str) -> None:
    run(BEFORE + use + AFTER)


@pytest.mark.slow
def test_a_compiler_that_is_loaded_is_left_alone() -> None:
    run(
        "import torch._dynamo; before = torch._dynamo.disable\n"
        "import apportion.capture.record\n"
        "assert torch._dynamo.disable is before"
    )
