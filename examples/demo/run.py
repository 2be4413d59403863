"""Start the demo: one training process per rank on this machine.

Usage: python examples/demo/run.py [--ranks 2] [--steps 120] [--seed 0] [--model qwen2_5_vl] [--out runs/demo]
"""

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

#: The folder that holds the package `demo`.
EXAMPLES = Path(__file__).resolve().parents[1]
LOOPBACK = "127.0.0.1"
#: Names of the loopback interface on Linux and macOS.
LOOPBACK_INTERFACES = ("lo", "lo0")
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}


def make_parser() -> argparse.ArgumentParser:
    """Return the options, which the training processes read again."""
    parser = argparse.ArgumentParser(description="Train a tiny vision-language model on balanced packs of real data.")
    parser.add_argument("--ranks", type=_positive, default=2, help="training processes (default: %(default)s)")
    parser.add_argument("--steps", type=_positive, default=120, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of data and weights (default: %(default)s)")
    parser.add_argument("--model", choices=("qwen2_5_vl", "qwen3_vl"), default="qwen2_5_vl", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the results (default: %(default)s)")
    return parser


def main(arguments: list[str]) -> int:
    """Run the training processes and return their exit code."""
    options = make_parser().parse_args(arguments)
    print(f"Starting {options.ranks} training process{'es' if options.ranks > 1 else ''} ...", flush=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={options.ranks}"]
    rendezvous = [f"--master-addr={LOOPBACK}", f"--master-port={free_port()}"]
    return subprocess.run([*launcher, *rendezvous, "-m", "demo.train", *arguments], env=_environment(), check=False).returncode


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _environment() -> dict[str, str]:
    """Return the environment of the training processes; what the user has set already stays."""
    paths = [str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    loopback = next((name for _, name in socket.if_nameindex() if name in LOOPBACK_INTERFACES), None)
    # One thread per rank: the ranks share the cores, and more threads than cores slow all of them down.
    defaults = QUIET | {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": loopback} if loopback else {})
    return defaults | os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
