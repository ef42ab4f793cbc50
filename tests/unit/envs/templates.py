"""Chat templates with the structure of public ones, in a minimal form, and a small byte-level tokenizer for them."""

from __future__ import annotations

import copy
import functools
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_OPENS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + _OPENS
)

# A header of two special tokens, contents trimmed, nothing between two messages.
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# Takes tools; keeps the thoughts of turns after the last user's message alone, adds an empty one to a last message
# without, and puts the answers of tools that follow each other into one user's turn.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
    {{- '# Tools\n<tools>' }}{% for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = '' %}{% set content = m.content %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- content }}{% endif %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""

# Takes turns of user and assistant alone, as Gemma's and Mistral's do.
ALTERNATING = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + _OPENS
)

# Knows no tools, and says nothing about it.
DROPS_TOOLS = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}" + _OPENS
)

# Opens a turn with a thought that it leaves out once the turn is over.
OPENS_THOUGHT = CHATML.removesuffix(_OPENS) + _OPENS.replace("assistant\n", "assistant\n<think>\n")

NO_END = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"

# Ends an assistant's turn with another token when it is the last one, as gpt-oss's does.
_LAST = "('<|eot_id|>' if loop.last and m.role == 'assistant' else '<|im_end|>\n')"
OTHER_END = CHATML.replace("m.content + '<|im_end|>\n' }}{% endfor", f"m.content + {_LAST} }}}}{{% endfor")

# Writes an assistant's message otherwise when it is not the last one.
REWRITES = CHATML.replace("m.content +", "(m.content if loop.last else m.content | replace('four', '4')) +")

# Leaves out the system message once the conversation is longer.
DROPS_SYSTEM = CHATML.replace(
    "in messages %}", "in (messages[1:] if messages[0].role == 'system' and messages | length > 3 else messages) %}"
)

# Shortens what a tool answered once the next turn is over.
_ANSWERED = "m.role == 'tool' and not loop.last and messages[loop.index].role == 'assistant'"
SHORTENS = CHATML.replace("m.content +", f"('..' if {_ANSWERED} else m.content) +")

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
)  # fmt: skip


# Llama-3's and Qwen's: a run of line breaks is one piece, whatever follows it.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def _trained(breaks_lines_up: bool) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if breaks_lines_up
        else pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(_PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    )
    core.decoder = decoders.ByteLevel()
    text = ["What is two and two? It is four.\n\nassistant user system tool\n" * 3, '{"name": "add", "a": 2}\n\n\n']
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)  # type: ignore[call-arg]
    core.train_from_iterator(text, trainer)
    out = PreTrainedTokenizerFast(tokenizer_object=core)
    out.add_special_tokens({"additional_special_tokens": list(SPECIAL)})  # type: ignore[dict-item]
    out.add_tokens(["<think>", "</think>"])  # one token, and no control token, as in Qwen3's
    return out


def tokenizer(template: str, breaks_lines_up: bool = False) -> Any:
    """Byte-level, with the control tokens of SPECIAL. `breaks_lines_up`: two line breaks are one piece at the end of a
    text, and two before a word, as GPT-2's."""
    out = copy.deepcopy(_trained(breaks_lines_up))
    out.chat_template = template
    return out
