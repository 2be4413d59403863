"""A saved processor, opened with or without torchvision."""

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def load_processor(folder: str | Path) -> Any:
    """Open a processor, or a tokenizer, by its folder or by its name on the hub.

    A processor class insists on a video processor, and those of transformers need torchvision. Where it is missing, the
    processor is put together without one: it encodes images and text.

    Args:
        folder: a folder that `save_pretrained` wrote, or a name on the hub such as "org/name", which is read from the hub's
            cache or fetched into it, as `AutoProcessor` does.

    Raises:
        ValueError: a folder without a processor or tokenizer, one whose processor `transformers` does not know, or a name
            that is neither a folder nor on a hub that can be reached.
    """
    from transformers import AutoProcessor, AutoTokenizer

    folder = Path(folder) if Path(folder).is_dir() else _fetched(str(folder))
    settings = saved_settings(folder)
    if not settings:
        _check_tokenizer_alone(folder)
        try:
            return AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # what is missing shows in many ways
            raise ValueError(f"{folder} holds neither a processor nor a tokenizer: {error}") from error
    try:
        found = AutoProcessor.from_pretrained(folder)
    except (ImportError, ValueError, TypeError, AttributeError, OSError, KeyError):
        return without_video(folder, settings)
    if not hasattr(found, "tokenizer"):  # where it does not know the class, AutoProcessor opens what else lies there
        raise ValueError(f"{folder}: transformers does not know the processor {_class_named(settings)!r}: update it")
    return found


def _fetched(name: str) -> Path:
    """Return the folder in the hub's cache that holds a processor."""
    from huggingface_hub import snapshot_download

    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise ValueError(f"no folder {name}")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]))
    except Exception as error:
        raise ValueError(f"{name!r} is no folder, and the hub has no such model or cannot be reached: {error}") from error


def _class_named(settings: dict[str, Any]) -> str:
    """Return the class that saved settings name."""
    names = ("processor_class", "image_processor_type", "feature_extractor_type")
    return str(next((settings[name] for name in names if name in settings), None))


def saved_settings(folder: Path) -> dict[str, Any]:
    """Return what a folder says about its processor; empty where it holds a tokenizer alone."""
    found: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = folder / name
        if file.is_file():
            found.update(_settings_in(file))
    return found


def _settings_in(file: Path) -> dict[str, Any]:
    """Return the settings in a file.

    Raises:
        ValueError: it holds something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold settings by name, got a {type(found).__name__}")
    return found


def _check_tokenizer_alone(folder: Path) -> None:
    """Raise `ValueError` for a tokenizer that belongs to a processor whose own settings are missing."""
    import transformers

    file = folder / "tokenizer_config.json"
    name = _settings_in(file).get("processor_class") if file.is_file() else None
    if name is not None and not hasattr(transformers, name):
        raise ValueError(
            f"{folder}: transformers does not know the processor {name!r} that its tokenizer belongs to: update it"
        )


def without_video(folder: Path, settings: dict[str, Any]) -> Any:
    """Return a folder's processor without its video processor."""
    import transformers
    from transformers import AutoTokenizer

    image_settings = dict(settings.get("image_processor", settings))
    name = image_settings.pop("image_processor_type", "").removesuffix("Fast").removesuffix("Pil")
    image_class = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name, None)
    processor_class = getattr(transformers, settings.get("processor_class", ""), None)
    if image_class is None or processor_class is None:
        by = f" with images by {name!r}" if name else ""
        raise ValueError(f"{folder}: transformers cannot open the processor {_class_named(settings)!r}{by}")
    image_settings.pop("processor_class", None)
    try:
        return put_together(
            processor_class,
            image_class(**image_settings),
            AutoTokenizer.from_pretrained(folder),
            {**settings, **image_settings},
        )
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder}: {settings['processor_class']} cannot be opened here: {error}") from error


def put_together(processor_class: Any, image_processor: Any, tokenizer: Any, settings: Mapping[str, Any]) -> Any:
    """Return a processor of images and text alone, though its class insists on further parts.

    Args:
        processor_class: a processor of transformers.
        image_processor: its image processor.
        tokenizer: its tokenizer; the chat template is the tokenizer's.
        settings: further settings by name; those that the class does not take are left out.
    """
    name = processor_class.__name__

    def check(self: Any, part: str, value: Any) -> Any:
        return None if value is None else processor_class.check_argument_for_proper_class(self, part, value)

    light = type(name, (processor_class,), {"check_argument_for_proper_class": check})
    taken = inspect.signature(processor_class.__init__).parameters
    parts = {"image_processor": image_processor, "tokenizer": tokenizer, "chat_template": tokenizer.chat_template}
    absent = {part: None for part in processor_class.get_attributes() if part not in parts}
    given = {key: value for key, value in settings.items() if key in taken and key not in (*parts, *absent)}
    found = light(**given, **{key: value for key, value in {**absent, **parts}.items() if key in taken})
    light.get_attributes = classmethod(lambda cls: ["image_processor", "tokenizer"])  # type: ignore[attr-defined]
    return found
