"""Tokenizers made here, with chat templates of the kinds that models have."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

TEXT = "user assistant system tool model think the answer is 12 34 45 What Be brief. 1+1? 2+2? <start> \n" * 3

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Thoughts of turns before the last message of the user are dropped.
THOUGHTS = (
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < last.user %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The generation prompt opens a thought that no message has.
OPENS_THOUGHT = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
ROLES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

# Template → (its end of a turn, bos, eos).
KINDS = {
    "chatml": (CHATML, "<|im_end|>", None, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>", "<|begin_of_text|>", "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>", "<bos>", "<eos>"),
    "thoughts": (THOUGHTS, "<|im_end|>", None, "<|im_end|>"),
    "opens thought": (OPENS_THOUGHT, "<|im_end|>", None, "<|im_end|>"),
    "roles": (ROLES, None, "<bos>", "<eos>"),
}
SPECIAL = ["<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>"]


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    """The tokenizer of ``chatml`` with another chat template."""
    tokenizer = bytes_tokenizer("chatml")
    tokenizer.chat_template = template
    return tokenizer


def bytes_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges, and the template of that kind; it begins a text with its bos, if any."""
    template, end, bos, eos = KINDS[kind]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    names = {token for token in (*SPECIAL, end, bos, eos) if token}
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        extra_special_tokens=sorted(names - {bos, eos}),
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    if bos:
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, made.bos_token_id)]
        )
    return made


def pieces_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece's kind: a text that begins gets a space in front."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Metaspace(prepend_scheme="always"), decoders.ByteFallback(), decoders.Fuse()]
    )
    alphabet = sorted({*TEXT, "[", "]", "/", "I", "N", "S", "T"})
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=200, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        chat_template="{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
        clean_up_tokenization_spaces=False,
    )
