"""Writes zoo/catalogue.json: what `apportion models` lists, from the models themselves.

python tools/catalogue.py
"""

from __future__ import annotations

import dataclasses
import json

from apportion import zoo
from apportion.catalogue import CATALOGUE

if __name__ == "__main__":
    rows = [dataclasses.asdict(model) for model in zoo.counted()]
    CATALOGUE.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"wrote {CATALOGUE}: {len(rows)} models")
