"""A saved processor, opened with or without torchvision."""

import json
from pathlib import Path
from typing import Any


def load_processor(folder: str | Path) -> Any:
    """Open a processor, or a tokenizer, that was saved in a folder.

    A processor class insists on a video processor, and those of transformers need torchvision. Where it is missing, the
    processor is put together without one: it encodes images and text.

    Args:
        folder: a folder that `save_pretrained` wrote.

    Raises:
        ValueError: a folder without a processor or tokenizer.
    """
    from transformers import AutoProcessor, AutoTokenizer

    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}")
    settings = saved_settings(folder)
    if "image_processor_type" not in settings.get("image_processor", settings):
        return AutoTokenizer.from_pretrained(folder)
    try:
        return AutoProcessor.from_pretrained(folder)
    except (ImportError, ValueError, TypeError, AttributeError, OSError):
        return without_video(folder, settings)


def saved_settings(folder: Path) -> dict[str, Any]:
    """Return what a folder says about its processor; empty where it holds a tokenizer alone."""
    found: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = folder / name
        if file.is_file():
            found.update(json.loads(file.read_text(encoding="utf-8")))
    return found


def without_video(folder: Path, settings: dict[str, Any]) -> Any:
    """Return a folder's processor without its video processor."""
    import transformers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    image_settings = dict(settings.get("image_processor", settings))
    name = image_settings.pop("image_processor_type").removesuffix("Fast").removesuffix("Pil")
    image_class = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name, None)
    processor_class = getattr(transformers, settings.get("processor_class", ""), None)
    if image_class is None or processor_class is None:
        raise ValueError(f"{folder}: cannot open processor {settings.get('processor_class')!r} with images by {name!r}")
    parts = {"get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"])}
    light = type(processor_class.__name__, (processor_class,), parts)
    image_settings.pop("processor_class", None)
    return light(image_class(**image_settings), tokenizer, chat_template=tokenizer.chat_template)
