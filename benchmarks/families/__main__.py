"""Every family with ordinary positions: packs against the stock model on each sample alone, and real processors.

    make bench-families
    make bench-families BENCH_ARGS=--quick
    make bench-families BENCH_ARGS=--write-docs      # and the table of docs/model-families.md

Tiny random models of the real classes, in fp64; a row of the table is `pass` or `MISS`. Processors that transformers opens
beside torchvision alone are in `make test-videos`.
"""

import argparse
import sys
from collections.abc import Callable

from .compare import WithoutCasts, differences
from .encoded import encoded_differences, measured_differences
from .page import write_page
from .processors import PROCESSORS
from .tiny import FAMILIES, tiny_config

_LOGITS, _GRADIENTS, _AS_THEY_ARE = 1e-12, 1e-10, 1e-6
_QUICK = (
    "llava",
    "mistral3",
    "llava_next",
    "llava_onevision",
    "internvl",
    "smolvlm",
    "gemma3",
    "paligemma",
    "ovis2",
    "voxtral",
)


#: Family to what its checks found, for the page.
_FOUND: dict[str, dict[str, str]] = {}


def packed(family: str) -> tuple[bool, str]:
    """Compare a pack with its samples alone, casts of the model to single precision left as they are, and switched off."""
    logits, with_casts = differences(family)
    gradient = with_casts
    if max(logits * 1e2, gradient) > _GRADIENTS:
        with WithoutCasts():
            logits, gradient = differences(family)
    _note(family, logits=f"{logits:.0e}", gradients=f"{gradient:.0e}", with_casts=f"{with_casts:.0e}")
    text = f"logits {logits:.0e}  gradients {gradient:.0e} (as they are {with_casts:.0e})"
    return logits <= _LOGITS and gradient <= _GRADIENTS and with_casts <= _AS_THEY_ARE, text


def encoded(family: str) -> tuple[bool, str]:
    """Compare samples that the real processor makes."""
    logits, gradient = encoded_differences(family, PROCESSORS[family][0]())
    _note(family, encoded=f"{max(logits, gradient):.0e}")
    return logits <= _LOGITS and gradient <= _GRADIENTS, f"logits {logits:.0e}  gradients {gradient:.0e}"


def measured(family: str) -> tuple[bool, str]:
    """Measure 50 sizes, and pairs of them, without pixels."""
    wrong = measured_differences(family, PROCESSORS[family][0]())
    _note(family, measured=f"{wrong} of 60")
    return not wrong, f"{wrong} of 60 samples differ"


def _note(family: str, **figures: str) -> None:
    _FOUND.setdefault(family, {}).update(figures)


def table(title: str, check: Callable[[str], tuple[bool, str]], families: list[str]) -> list[str]:
    """Print a row for each family; return those that pass."""
    print(f"\n{title}")
    good = []
    for family in families:
        try:
            passes, text = check(family)
        except Exception as error:  # a row of the table, not the end of it
            passes, text = False, f"{type(error).__name__}: {error}"
        good += [family] if passes else []
        print(f"  {family:24s} {'pass' if passes else 'MISS'}  {text}", flush=True)
    return good


def main() -> int:
    """Run the tables; the exit code is 1 where a row misses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="ten families")
    parser.add_argument("--write-docs", action="store_true", help="write the table of docs/model-families.md")
    options = parser.parse_args()
    quick = options.quick
    families = [name for name in FAMILIES if not quick or name in _QUICK]
    processors = [name for name in PROCESSORS if not quick or name in _QUICK]
    exact = table(
        "a pack against its samples alone: text, one image, two of other sizes, a spelled token, a dummy", packed, families
    )
    made = table("samples of the real processor, through SampleEncoder", encoded, processors)
    sized = table("measured without pixels against encoded", measured, processors)
    audio = [name for name in exact if tiny_config(name).to_dict().get("audio_config")]
    totals = [
        ("families exact", len(exact), len(families), 35),
        ("of them audio", len(audio), 4, 4),
        ("families whose processor's samples are exact", len(made), len(processors), 20),
        ("processors measured without a difference", len(sized), len(processors), 20),
    ]
    print()
    for name, found, run, target in totals:
        told = "" if quick else f"  {'pass' if found >= target else 'MISS'}  (target: {target})"
        print(f"  {name}: {found} of {run}{told}")
    if options.write_docs and not quick:
        write_page(_FOUND)
    return int(len(exact) < len(families) or min(len(made), len(sized)) < len(processors))


if __name__ == "__main__":
    sys.exit(main())
