"""Draw the pictures of the pages on concepts, from plans and packs that the library makes.

python docs/drawings/draw.py [--check]
"""

import argparse
import importlib
import sys
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "images"
NAMES = ("pack", "step", "sync_points", "movement", "flow")


def main(arguments: list[str]) -> int:
    """Write the pictures that changed, or with `--check` only name them; return 1 where one did."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a picture is not what is committed")
    parser.add_argument("--into", type=Path, default=IMAGES, help="folder of the pictures (default: docs/images)")
    options = parser.parse_args(arguments)
    changed = 0
    for name in NAMES:
        file = options.into / f"{name}.svg"
        drawn = importlib.import_module(name).draw().svg()
        if file.is_file() and file.read_bytes() == drawn:
            continue
        changed += 1
        print(f"{file} {'is not what the library draws now' if options.check else 'drawn'}", flush=True)
        if not options.check:
            file.write_bytes(drawn)
    return int(options.check and changed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
