"""`evenpack masks show`: a conversation, coloured by what trains."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
#: Brackets around what trains, where there are no colours.
OPEN, CLOSE = "⟦", "⟧"


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("masks", help="show which tokens of a conversation train")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print a conversation coloured by what trains")
    show.add_argument("conversation", type=Path, help="JSON file with messages (or an example with messages), or lines of them")
    add_encoder_arguments(show)
    show.add_argument("--example", type=int, default=0, metavar="N", help="number of the example in a .jsonl file")
    show.add_argument("--strategy", dest="strategies", choices=("template", "prefix", "search"), help="use this strategy alone")
    show.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    show.set_defaults(run=run)


def add_encoder_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments from which an encoder is made."""
    parser.add_argument("--processor", type=Path, required=True, help="folder of a saved processor or tokenizer")
    parser.add_argument("--adapter", default="text", help="model family, for example qwen2_5_vl (default: text)")
    parser.add_argument("--model", type=Path, help="folder with the model's config.json; its values replace the family's")
    parser.add_argument("--preset", default="auto", help="chat format for masks (default: told from the template)")
    parser.add_argument("--min-pixels", type=int, help="least pixels of an image after resizing")
    parser.add_argument("--max-pixels", type=int, help="most pixels of an image after resizing")
    parser.add_argument(
        "--images", dest="folder", type=Path, help="folder that paths of images are relative to (default: the file's own)"
    )


def make_encoder(arguments: argparse.Namespace, folder: Path, **settings: Any) -> Any:
    """Return the encoder that the arguments describe."""
    from ..collate import SampleEncoder
    from ..collate.encoding import load_processor
    from ..models import adapter_for

    processor = load_processor(arguments.processor)
    if arguments.model is not None:
        from transformers import AutoConfig

        adapter = adapter_for(AutoConfig.from_pretrained(arguments.model))
    else:
        adapter = adapter_for(arguments.adapter)
    limits = {"min_pixels": arguments.min_pixels, "max_pixels": arguments.max_pixels}
    return SampleEncoder(processor, adapter, folder=arguments.folder or folder, preset=arguments.preset, **limits, **settings)


def run(arguments: argparse.Namespace) -> int:
    """Print the conversation."""
    strategies = {"strategies": (arguments.strategies,)} if arguments.strategies else {}
    encoder = make_encoder(arguments, arguments.conversation.parent, on_empty_mask="keep", **strategies)
    example = read_example(arguments.conversation, arguments.example)
    known = {"messages", "tools", "images", "videos", "text", "sample_id"}
    sample = encoder.encode({name: value for name, value in example.items() if name in known}, arguments.example)
    coloured = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
    print(_painted(sample, encoder.tokenizer, coloured))
    trains = int((sample["loss_weights"] > 0).sum())
    name = encoder.preset.name if encoder.preset else "unknown"
    print(f"\n{trains} of {len(sample['input_ids'])} tokens train; format {name}, found by: {sample['mask_strategy']}")
    return 0


def read_example(path: Path, number: int) -> dict[str, Any]:
    """Return an example of a file: one JSON value, or one of its lines.

    Raises:
        ValueError: no JSON, or a number beyond the lines.
    """
    if path.suffix == ".jsonl":
        from ..scheduler.offline import JsonLines

        lines = JsonLines(path)
        if not 0 <= number < len(lines):
            raise ValueError(f"{path} has {len(lines)} examples: example must be from 0 to {len(lines) - 1}, got {number}")
        return lines[number]
    data = json.loads(path.read_text(encoding="utf-8"))
    return {"messages": data} if isinstance(data, list) else data


def _painted(sample: dict[str, Any], tokenizer: Any, coloured: bool) -> str:
    """Return a sample's text, what trains in colour or in brackets; runs of media tokens are written as their number."""
    opening, closing = (GREEN, RESET) if coloured else (OPEN, CLOSE)
    ids, weights = sample["input_ids"].tolist(), sample["loss_weights"].tolist()
    types = sample["mm_token_type_ids"].tolist() if "mm_token_type_ids" in sample else [0] * len(ids)
    out, at = [], 0
    while at < len(ids):
        stop = at + 1
        while stop < len(ids) and (weights[stop], types[stop]) == (weights[at], types[at]):
            stop += 1
        text = (
            tokenizer.decode(ids[at:stop])
            if not types[at]
            else f"({stop - at} {'image' if types[at] == 1 else 'video'} tokens)"
        )
        if weights[at] > 0:
            # The weight is written where it is not 1.
            share = "" if weights[at] == 1 else f"{weights[at]:g}:"
            text = f"{opening}{share}{text}{closing}"
        elif coloured:
            text = f"{DIM}{text}{RESET}"
        out.append(text)
        at = stop
    return "".join(out)
