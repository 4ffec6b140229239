"""The README's examples work as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent.parent / "README.md"


def _examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_plan_then_train_with_torchrun(tmp_path: Path) -> None:
    plan, train, _ = _examples()
    (tmp_path / "plan.py").write_text(plan)
    (tmp_path / "train.py").write_text(train)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "train.py"]
    for arguments in (["plan.py"], launch):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 40  # ten losses on four ranks


def test_the_splits_of_a_product() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _examples()[2]], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[1].strip() for line in done.stdout.splitlines()] == ["i", "j", "k"]
