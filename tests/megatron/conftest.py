"""The example's modules are imported by their bare names, as the example itself does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "megatron"))
