"""Weights of a checkpoint that the Trainer leaves out when it resumes."""

import logging
from pathlib import Path
from typing import Any

from ...models.setup.unwrap import is_transformers_model

_logger = logging.getLogger(__name__)


def restore_weights(model: Any, folder: str | Path) -> None:
    """Load a checkpoint's weights where they carry other names than the model's.

    `save_pretrained` writes the names of the released checkpoints, which for some vision-language models are not those of the
    modules. The Trainer loads by the modules' names, warns of all that is missing, and goes on with the weights as they were.
    A line of the log behind that warning, at its level, says that the weights are there.

    Args:
        model: model of the Trainer; PEFT's adapters and models that are no `transformers` model keep their names.
        folder: the checkpoint.

    Raises:
        ValueError: weights that are missing in the checkpoint under any name.
    """
    files = sorted(Path(folder).glob("model*.safetensors"))
    if not is_transformers_model(model) or not files:
        return
    from safetensors import safe_open

    names: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as content:
            names.update(content.keys())
    if names <= set(model.state_dict()):
        return
    loaded, info = type(model).from_pretrained(folder, dtype=model.dtype, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"{folder} lacks weights of {type(model).__name__}: {sorted(info['missing_keys'])}")
    model.load_state_dict(loaded.state_dict())
    _logger.warning(
        "All weights of %s were loaded from %s. The missing and unexpected keys that transformers may have listed above are "
        "the released checkpoint's names of the same weights.",
        type(model).__name__,
        folder,
    )
