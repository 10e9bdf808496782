"""A character tokenizer in Hugging Face format: one token a character, lossless both ways."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Token ids: 0 padding, 1 end of sequence, then the characters of ``alphabet`` in its order.

    A character outside the alphabet has no id: encoding it raises, rather than training on an unknown token.
    """
    if len(set(alphabet)) != len(alphabet) or not alphabet:
        raise ValueError(f"alphabet must be distinct characters, got {alphabet!r}")
    vocabulary = {PAD: 0, EOS: 1} | {character: i + 2 for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )
