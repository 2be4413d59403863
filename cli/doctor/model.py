"""Whether a saved model keeps the samples of a pack apart."""

from pathlib import Path
from typing import Any

from .finding import Finding


def check_model(folder: str) -> Finding:
    """Load a model and its processor, on the GPU where there is one, and compare samples in a pack with the same ones alone.

    Args:
        folder: what `save_pretrained` wrote of the model and of its processor.
    """
    import torch

    from ...collate import load_processor, verify_isolation
    from ...core import EvenpackError
    from ...models import adapter_for, prepare_model

    try:
        model = _loaded(folder)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        adapter = adapter_for(model.config)
        processor = load_processor(folder) if adapter.media_tokens else None
        change = verify_isolation(prepare_model(model, adapter), adapter, processor=processor)
    except (EvenpackError, ValueError, OSError) as error:
        fix = "see the page on model families: a model that fails here must not be trained on packs"
        text = f"{folder}: {type(error).__name__}: {error}"
        return Finding(name="model", level="wrong", text=text, fix=fix)
    made = "texts" if processor is None else "samples of its processor"
    text = f"{type(model).__name__}: {made} in a pack equal those alone (largest difference {change:.1g} of the largest output)"
    return Finding(name="model", text=text, figures={"family": adapter.name, "change": change})


def _loaded(folder: str) -> Any:
    """Return the model of a folder, of the class that its config names.

    Raises:
        ValueError: no such folder, or a config that names no class of transformers.
    """
    import transformers

    if not Path(folder).is_dir():
        raise ValueError(f"no folder {folder}")
    names = transformers.AutoConfig.from_pretrained(folder).architectures or []
    model_class = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
    if model_class is None:
        raise ValueError(f"transformers has no model of the classes {names} that the config names")
    return model_class.from_pretrained(folder, dtype="auto")
