"""A tokenizer with a chat template, made here, and made-up chats with answers of very different lengths."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.runtime.data.tokenizer import ByteTokenizer

TURN, END, BETWEEN = "<|turn|>", "<|end|>", "<|between|>"
IDS = 259  # bytes and these three
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|end|>{% endgeneration %}{% else %}{{ message.content }}<|end|>{% endif %}"
    "{% endfor %}"
)


def a_tokenizer(folder: Path, template: str = TEMPLATE) -> str:
    """Its directory."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer.from_str(ByteTokenizer().files()["tokenizer.json"].decode())
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (TURN, END, BETWEEN)])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=BETWEEN, clean_up_tokenization_spaces=False)
    fast.chat_template = template or None
    fast.save_pretrained(folder)
    return str(folder)


def a_chat(number: int) -> list[dict[str, str]]:
    """Of one or two answers, each of 1 to 25 letters."""
    chat = []
    for turn in range(1 + number % 2):
        word = "abcdefghijklmnopqrstuvwxyz"[(number + turn) % 20 :][: 1 + number % 6]
        chat.append({"role": "user", "content": f"{word}?"})
        chat.append({"role": "assistant", "content": word * (1 + number * 7 % 5)})
    return chat


def some_chats(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"messages": a_chat(number)}) + "\n" for number in range(count)))
    return str(path)
