"""Chat formats as data: which strings open a turn, which end one, and how thinking is marked."""

# ruff: noqa: RUF001 (the markers are what they are)
import msgspec


class MaskPreset(msgspec.Struct, frozen=True, kw_only=True):
    """The markers of a chat format.

    Attributes:
        name: name of the format.
        assistant: strings after which the assistant speaks; white space at their end belongs to the header.
        others: strings that open any other part (system, user, tool results, tool declarations).
        ends: strings that the assistant writes to end its turn; they train.
        end_opens_next: the end of a turn is the opening marker of the next one (GLM stops at `<|user|>`).
        optional: white space that may follow the header, and belongs to it where it is there.
        thinking: opening and closing marker of thinking.
        closed_thinking: a closing marker alone, right behind the header, is thinking left out.
        signature: a string of the template that tells the format from the others.

    Example:
        >>> PRESETS["chatml"].ends
        ('<|im_end|>',)
    """

    name: str
    assistant: tuple[str, ...]
    others: tuple[str, ...]
    ends: tuple[str, ...]
    end_opens_next: bool = False
    optional: str = ""
    thinking: tuple[str, str] | None = ("<think>", "</think>")
    closed_thinking: bool = False
    signature: str = ""

    def __post_init__(self) -> None:
        if not self.assistant or not self.ends:
            raise ValueError(f"preset {self.name!r} needs at least one assistant marker and one end marker")
        if not all((*self.assistant, *self.others, *self.ends)):
            raise ValueError(f"preset {self.name!r}: markers must not be empty")

    @property
    def literals(self) -> tuple[str, ...]:
        """The control strings that text of a conversation might spell: every marker up to its first closing bracket."""
        return tuple(dict.fromkeys(head(marker) for marker in (*self.assistant, *self.others, *self.ends)))


def head(marker: str) -> str:
    """Return a marker up to its first closing bracket: its control token.

    Example:
        >>> head("<|im_start|>assistant"), head("[/INST]")
        ('<|im_start|>', '[/INST]')
    """
    closing = [at for at in (marker.find(">"), marker.find("]")) if at >= 0]
    return marker[: min(closing) + 1] if closing else marker


_ALL = (
    MaskPreset(
        name="kimi",
        assistant=("<|im_assistant|>assistant<|im_middle|>",),
        others=("<|im_user|>", "<|im_system|>"),
        ends=("<|im_end|>",),
        signature="<|im_middle|>",
    ),
    MaskPreset(
        name="chatml",
        assistant=("<|im_start|>assistant\n",),
        others=tuple(f"<|im_start|>{role}\n" for role in ("system", "user", "tool", "developer")),
        ends=("<|im_end|>",),
        signature="<|im_start|>",
    ),
    MaskPreset(
        name="llama3",
        assistant=("<|start_header_id|>assistant<|end_header_id|>\n\n",),
        others=tuple(f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("system", "user", "ipython", "tool")),
        ends=("<|eot_id|>", "<|eom_id|>"),
        thinking=None,
        signature="<|start_header_id|>",
    ),
    MaskPreset(
        name="gemma",
        assistant=("<start_of_turn>model\n",),
        others=("<start_of_turn>user\n", "<start_of_turn>developer\n"),
        ends=("<end_of_turn>",),
        thinking=None,
        signature="<start_of_turn>",
    ),
    MaskPreset(  # results of tools stand inside the model's turn, which it leaves by their opening marker
        name="gemma4",
        assistant=("<|turn>model\n", "<tool_response|>"),
        others=("<|turn>system\n", "<|turn>user\n", "<|tool_response>"),
        ends=("<turn|>", "<|tool_response>"),
        thinking=("<|channel>thought\n", "<channel|>"),
        signature="<|turn>",
    ),
    MaskPreset(
        name="glm",
        assistant=("<|assistant|>",),
        others=("<|system|>", "<|user|>", "<|observation|>"),
        ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
        end_opens_next=True,
        optional="\n",
        closed_thinking=True,
        signature="<|observation|>",
    ),
    MaskPreset(
        name="deepseek",
        assistant=("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>"),
        others=("<｜User｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>"),
        ends=("<｜end▁of▁sentence｜>",),
        closed_thinking=True,
        signature="<｜Assistant｜>",
    ),
    MaskPreset(
        name="nemotron",
        assistant=("<SPECIAL_11>Assistant\n",),
        others=("<SPECIAL_10>System\n", "<SPECIAL_11>User\n", "<SPECIAL_11>Tool\n"),
        ends=("<SPECIAL_12>",),
        signature="<SPECIAL_11>",
    ),
    MaskPreset(
        name="mistral",
        assistant=("[/INST]", "[/TOOL_RESULTS]"),
        others=("[INST]", "[SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
        ends=("</s>",),
        thinking=("[THINK]", "[/THINK]"),
        signature="[/INST]",
    ),
)

#: Presets by name, in the order in which a template is compared with them.
PRESETS: dict[str, MaskPreset] = {preset.name: preset for preset in _ALL}

#: Other names of the same formats.
_ALIASES: dict[str, str] = {"qwen": "chatml", "ministral": "mistral"}


def preset_named(name: str) -> MaskPreset:
    """Return the preset of a name.

    Raises:
        ValueError: no such preset; the known ones are named.
    """
    found = PRESETS.get(_ALIASES.get(name, name))
    if found is None:
        raise ValueError(f"unknown mask preset {name!r}; known: {', '.join((*PRESETS, *_ALIASES))}")
    return found


def detect_preset(template: str) -> MaskPreset | None:
    """Return the preset whose signature a chat template contains, None where it is of no known format.

    Example:
        >>> detect_preset("{{ '<|im_start|>' + message.role }}").name
        'chatml'
    """
    return next((preset for preset in _ALL if preset.signature in template), None)
