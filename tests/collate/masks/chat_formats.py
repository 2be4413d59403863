"""Chat templates of every format, written small, and a tokenizer that knows all their control tokens."""

# ruff: noqa: E501, RUF001 (templates and their markers are what they are)
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from evenpack.collate.masks import PRESETS

#: ChatML as Qwen3 writes it: thinking of earlier turns is stripped, the last turn gets an empty block without thinking,
#: tool results are grouped in a user turn.
CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + c.function.name + (c.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}"""

#: The same with a generation tag around what the assistant writes.
TAGGED = CHATML.replace("{%- if loop.index0 > ns.last %}", "{%- generation %}{%- if loop.index0 > ns.last %}").replace(
    "{%- endfor %}\n{{- '<|im_end|>\\n' }}\n{%- elif m.role == 'tool' %}",
    "{%- endfor %}\n{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}\n{%- elif m.role == 'tool' %}",
)

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for m in messages %}
{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls %}{{- m.content }}{% for c in m.tool_calls %}{{- {'name': c.function.name, 'parameters': c.function.arguments} | tojson }}{% endfor %}
{{- '<|eom_id|>' }}
{%- else %}{{- m.content + '<|eot_id|>' }}{% endif %}
{%- endfor %}"""

GEMMA = """\
{{- '<bos>' }}
{%- for m in messages %}
{%- set role = 'model' if m.role == 'assistant' else 'user' %}
{%- if loop.index0 > 0 and m.role == 'user' and messages[loop.index0 - 1].role in ('user', 'tool') %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '```tool_code ' + c.function.name + (c.function.arguments | tojson) + '```' }}{% endfor %}
{{- '<end_of_turn>\\n' }}
{%- endfor %}"""

GEMMA4 = """\
{{- '<bos>' }}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set i = loop.index0 %}
{%- if i == 0 or messages[i - 1].role != 'tool' %}{{- '<|turn>model\\n' }}{% endif %}
{%- if m.reasoning_content and i > ns.last %}{{- '<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>' }}{% endif %}
{%- for c in m.tool_calls or [] %}{{- '<|tool_call>call:' + c.function.name + (c.function.arguments | tojson) + '<tool_call|>' }}{% endfor %}
{%- if m.tool_calls %}
{%- for t in messages[i + 1:i + 1 + m.tool_calls | length] if t.role == 'tool' %}{{- '<|tool_response>' + t.content + '<tool_response|>' }}
{%- else %}{{- '<|tool_response>' }}
{%- endfor %}
{%- endif %}
{{- m.content }}
{%- if not m.tool_calls %}{{- '<turn|>\\n' }}{% endif %}
{%- elif m.role != 'tool' %}{{- '<|turn>' + m.role + '\\n' + m.content + '<turn|>\\n' }}{% endif %}
{%- endfor %}"""

MISTRAL = """\
{{- '<s>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'user' %}
{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}
{%- if m.reasoning_content is defined %}{{- '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (c.function.arguments | tojson) }}{% endfor %}
{{- '</s>' }}
{%- endif %}
{%- endfor %}"""

KIMI = """\
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_assistant|>assistant<|im_middle|><think>' + (m.reasoning_content or '') + '</think>' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '<|tool_call_begin|>' + c.function.name + (c.function.arguments | tojson) + '<|tool_call_end|>' }}
{%- endfor %}{{- '<|im_end|>' }}
{%- elif m.role == 'user' %}{{- '<|im_user|>user<|im_middle|>' + m.content + '<|im_end|>' }}
{%- else %}{{- '<|im_system|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}{% endif %}
{%- endfor %}"""

GLM = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\n' + (tools | tojson) }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|assistant|>\\n<think>' + (m.reasoning_content or '') + '</think>\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + c.function.name + (c.function.arguments | tojson) + '</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{% endif %}{{- '\\n<tool_response>' + m.content + '</tool_response>' }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{% endif %}
{%- endfor %}"""

DEEPSEEK = """\
{{- '<｜begin▁of▁sentence｜>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content }}
{%- elif m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<｜tool▁outputs▁begin｜>' }}{% else %}{{- '\\n' }}{% endif %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- else %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<｜Assistant｜>' }}{% endif %}
{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{% else %}{{- '</think>' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}{{- '<｜tool▁call▁begin｜>' + c.function.name + (c.function.arguments | tojson) + '<｜tool▁call▁end｜>' }}
{%- endfor %}{{- '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}"""

NEMOTRON = """\
{{- '<SPECIAL_10>System\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{% endif %}{{- '\\n\\n' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<SPECIAL_11>User\\n' + m.content + '\\n' }}
{%- elif m.role == 'tool' %}{{- '<SPECIAL_11>User\\n<TOOL_RESPONSE>' + m.content + '</TOOL_RESPONSE>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<SPECIAL_11>Assistant\\n<think>' + (m.reasoning_content or '') + '</think>' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '<TOOLCALL>' + c.function.name + (c.function.arguments | tojson) + '</TOOLCALL>' }}{% endfor %}
{{- '\\n<SPECIAL_12>\\n' }}
{%- endif %}
{%- endfor %}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "gemma4": GEMMA4,
    "mistral": MISTRAL,
    "kimi": KIMI,
    "glm": GLM,
    "deepseek": DEEPSEEK,
    "nemotron": NEMOTRON,
}
FURTHER = ("<|begin_of_text|>", "<bos>", "<s>", "[gMASK]", "<sop>", "<｜begin▁of▁sentence｜>", "[THINK]", "[/THINK]", "[TOOL_CALLS]",
           "[ARGS]", "[/SYSTEM_PROMPT]", "[/AVAILABLE_TOOLS]", "<|end_header_id|>", "<|im_middle|>", "<|endoftext|>", "<|vision_start|>",
           "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")  # fmt: skip


@cache
def tokenizer(thinking_tokens: bool = False, trim_offsets: bool = False):
    """Return a byte-level tokenizer without merges but for a few, so that line breaks melt together as they really do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline, space = "\u010a", "\u0120"
    merges = [(newline, newline), (">", newline), ("t", "h"), ("th", "e"), (space, "the")]
    vocabulary = alphabet + ["".join(pair) for pair in merges]
    backend = Tokenizer(models.BPE({piece: at for at, piece in enumerate(vocabulary)}, merges))
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    if trim_offsets:
        from tokenizers import processors

        backend.post_processor = processors.ByteLevel(trim_offsets=True, add_prefix_space=False)
    special = list(FURTHER)
    for preset in PRESETS.values():
        special += [text for text in preset.literals if text not in special]
    special += ["<think>", "</think>"] if thinking_tokens else []
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def with_template(template: str, **settings):
    """Return the tokenizer with a chat template."""
    import copy

    found = copy.copy(tokenizer(**settings))
    found.chat_template = template
    return found
