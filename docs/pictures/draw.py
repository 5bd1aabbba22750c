"""Draws the pictures of README and documentation into docs/images.

python docs/pictures/draw.py                      # all of them
python docs/pictures/draw.py pool.gif waste.svg
"""

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
PICTURES = {
    "pool.gif": ("pool_picture", "animate"),
    "pool.svg": ("pool_picture", "still"),
    "block_table.svg": ("block_table", "draw"),
    "copy_on_write.svg": ("copy_on_write", "draw"),
    "waste.svg": ("memory", "draw_waste"),
    "fragmentation.svg": ("memory", "draw_fragmentation"),
    "throughput.svg": ("timings", "draw_throughput"),
    "attention_time.svg": ("timings", "draw_attention_time"),
    "allocator_time.svg": ("timings", "draw_allocator_time"),
}
"""Module and function of each; the function takes the path."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(PICTURES)}")
    names = parser.parse_args().names or list(PICTURES)
    if unknown := set(names) - set(PICTURES):
        parser.error(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    sys.path.append(str(ROOT / "benchmarks"))  # of whose simulator some are drawn
    IMAGES.mkdir(exist_ok=True)
    for name in names:
        module, function = PICTURES[name]
        getattr(importlib.import_module(module), function)(IMAGES / name)
        print(IMAGES / name)


if __name__ == "__main__":
    main()
