"""A tokenizer is a function of its tokenizer.json: read as the file says, and written so that other readers agree.

transformers 5 builds the tokenizers of some families anew, with the family's own pre-tokenizer in the place of the
file's. A folder whose file says otherwise would be read as other ids, and exported as another file.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rl_bridge.common.terminal import remark
from rl_bridge.models.model_folder import TOKENIZER, folder_of, made, require_place

CONFIG = "tokenizer_config.json"
PROBE = "In 2023, 650841823 = 1234567 + x;\n\n  two lines,\ttabs   and it's naïve – “中文” 🙂 e\u0301\r\n  Hello world "
"""Digits, spaces, several lines, marks of many alphabets: what families cut in different ways."""
FAST = "PreTrainedTokenizerFast"
"""The class that every version of transformers reads as the file says."""
_VERSION_5 = "TokenizersBackend"
"""Another name of that class, which transformers 4 lacks."""
_PARTS = ("normalizer", "pre_tokenizer", "model", "decoder")
_READ_FROM = "read_from"
_OBEDIENT = ("LlamaTokenizer", "CodeLlamaTokenizer", "CohereTokenizer", "GemmaTokenizer", "GPTNeoXTokenizer")
"""Classes of transformers 4 that put the tokens of a beginning and an end as their settings say, not as the file."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The files that a tokenizer was read from, in memory: the folder may be gone at the end of a run."""

    text: bytes
    """The content of tokenizer.json."""
    config: Mapping[str, Any]
    """The content of tokenizer_config.json."""
    fingerprint: str | None
    """The tokenizer's, as it was read. None: it has more tokens than tokenizer.json, by its configuration."""


def tokenizer_in(name: str, *, alone: bool = False, say: Callable[[str], None] = remark) -> Any:
    """The tokenizer of a folder or hub id, whose ids are those of its tokenizer.json, if it has one.

    ``alone``: no model need lie beside it. ``say`` is told of a file that transformers would not follow.

    Raises:
        ValueError: there is none, its files are missing, or its settings give other ids than its tokenizer.json.
    """
    require_place(name, model=not alone)

    tokenizer = made(name, what="its tokenizer: ", make=lambda: _as_its_file(name, say))
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(f"the tokenizer of {name!r} has no tokens but special ones: is {TOKENIZER} missing?")
    return tokenizer


def _as_its_file(name: str, say: Callable[[str], None]) -> Any:
    """transformers' tokenizer, or the one that its file describes; with the files that it was read from."""
    folder = Path(name) if Path(name).is_dir() else folder_of(name, (TOKENIZER, CONFIG))
    tokenizer, failure = None, None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of any kind: a class that cannot take what is another's
        failure = error
    if not (folder / TOKENIZER).is_file():
        if failure is not None:
            raise failure
        return tokenizer
    text = (folder / TOKENIZER).read_bytes()
    own = Tokenizer.from_str(text.decode())
    own.no_truncation()
    own.no_padding()
    config = json.loads((folder / CONFIG).read_text("utf-8")) if (folder / CONFIG).is_file() else {}
    if tokenizer is None or not _is_of(tokenizer, own):
        plain: Any = PreTrainedTokenizerFast.from_pretrained(name)
        for special in plain.SPECIAL_TOKENS_ATTRIBUTES:
            # The class has names of its own for tokens that the configuration does not name.
            token = getattr(tokenizer, special, None)
            if getattr(plain, special) is None and token is not None and own.token_to_id(str(token)) is not None:
                setattr(plain, special, token)
        if _difference(plain, own) is not None:
            raise ValueError(_refusal(plain, own))
        if tokenizer is None:
            say(f"{name}: transformers fails on its tokenizer ({failure}), and its {TOKENIZER} is followed")
        elif (difference := _difference(tokenizer, own)) is not None:
            say(
                f"{name}: its {TOKENIZER} reads {difference}, as transformers' {type(tokenizer).__name__} does not: "
                f"the file is followed, here and in what is exported. Read the folder by {FAST} elsewhere, too"
            )
        tokenizer = plain
    for flag, value, does in _claims(tokenizer, config):
        say(
            f'{name}: its {CONFIG} says "{flag}": {json.dumps(value)}, which transformers 4 obeys, and its {TOKENIZER} '
            f"does otherwise: a text is read {'with' if does else 'without'} this token, here and in what is exported. "
            f"If that is wrong: tokenizer = AutoTokenizer.from_pretrained({name!r}); tokenizer.{flag} = {value}; "
            "tokenizer.save_pretrained(FOLDER)"
        )
    fingerprint = _fingerprint(tokenizer) if len(tokenizer) == own.get_vocab_size() else None
    setattr(tokenizer, _READ_FROM, TokenizerFiles(text, config, fingerprint))
    return tokenizer


def _claims(tokenizer: Any, config: Mapping[str, Any]) -> Iterator[tuple[str, bool, bool]]:
    """(flag, what the configuration says, what is done), where a class of transformers 4 would obey it."""
    kind = config.get("tokenizer_class")
    if kind is not None and kind.removesuffix("Fast") not in _OBEDIENT:
        return
    for flag, does in _adds(tokenizer).items():
        token = getattr(tokenizer, flag.removeprefix("add_"))
        if isinstance(config.get(flag), bool) and config[flag] != does and token is not None:
            yield flag, config[flag], does


def _adds(tokenizer: Any) -> dict[str, bool]:
    """Whether a text gets the token of a sequence's beginning, and that of its end."""
    text = probe(tokenizer)
    ids, plain = tokenizer(text).input_ids, tokenizer(text, add_special_tokens=False).input_ids
    begins, ends = ids[: len(plain)] != plain, ids[len(ids) - len(plain) :] != plain
    return {
        "add_bos_token": begins and ids[:1] == [tokenizer.bos_token_id],
        "add_eos_token": ends and ids[-1:] == [tokenizer.eos_token_id],
    }


def _fingerprint(tokenizer: Any) -> str:
    """The same for tokenizers that are alike in every part that decides ids and texts."""
    backend, digest = tokenizer.backend_tokenizer, hashlib.sha256()
    for part in (*_PARTS, "post_processor"):
        digest.update(repr(_state(backend, part)).encode())
    for number, token in sorted(backend.get_added_tokens_decoder().items()):
        digest.update(repr((number, token.__getstate__())).encode())
    return digest.hexdigest()


def _is_of(tokenizer: Any, own: Tokenizer) -> bool:
    """Whether every part that decides ids and texts is the file's."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # Without a post-processor in the file, the class says which tokens a text begins with.
    parts = (*_PARTS, "post_processor") if own.post_processor is not None else _PARTS
    if backend is None or any(_state(backend, part) != _state(own, part) for part in parts):
        return False
    added = backend.get_added_tokens_decoder()
    return all(
        number in added and added[number].__getstate__() == token.__getstate__()
        for number, token in own.get_added_tokens_decoder().items()
    )


def _state(backend: Tokenizer, part: str) -> Any:
    value = getattr(backend, part)
    return None if value is None else value.__getstate__()


def _difference(tokenizer: Any, own: Tokenizer) -> str | None:
    """Where the ids of a text are others than the file's: the file's, and these. None: they are the same."""
    added = own.get_added_tokens_decoder()
    text = probe(own.encode, [added[number].content for number in sorted(added)])
    for special in (False, True) if own.post_processor is not None else (False,):
        expected = own.encode(text, add_special_tokens=special).ids
        try:
            ids = tokenizer(text, add_special_tokens=special).input_ids
        except Exception as error:  # a class whose unknown token the file has not
            return f"{text[:20]!r}… as the ids {expected[:7]} and not with the error {error}"
        if ids != expected:
            place = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), 0)
            here, there = slice(max(0, place - 1), place + 6), f"from token {place} on of {text[:20]!r}…"
            return f"{there} the ids {expected[here]} and not {ids[here]}"
    return None


def probe(encode: Callable[[str], Any], tokens: Sequence[str] = ()) -> str:
    """``PROBE``, and the tokens with spaces before them: as much as can be encoded.

    Some tokenizers raise where they have no token.
    """
    pieces = [*PROBE, *(piece for token in tokens for piece in (" ", token))]

    def can(text: str) -> bool:
        try:
            encode(text)
        except Exception:  # the tokenizers library raises it bare
            return False
        return True

    return text if can(text := "".join(pieces)) else "".join(filter(can, pieces))


def _refusal(tokenizer: Any, own: Tokenizer) -> str:
    return (
        f"its {TOKENIZER} reads {_difference(tokenizer, own)}, which transformers gives by {CONFIG}: take what changes "
        f'the file out of it ("added_tokens_decoder", "split_special_tokens"), or save the tokenizer anew: '
        f'{FAST}(tokenizer_file="{TOKENIZER}", eos_token=…).save_pretrained(FOLDER)'
    )


# Written: the file that came in, and a configuration that transformers 4 reads as well.


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer into a folder that is there, with the tokenizer.json that it was read from, byte for byte.

    A tokenizer that has changed since, as by more tokens, is written as it is. The names in tokenizer_config.json are
    those of transformers 5 and of 4, and its class is the one that follows the file in both.
    """
    tokenizer.save_pretrained(str(folder))
    files: TokenizerFiles | None = getattr(tokenizer, _READ_FROM, None)
    if files is not None and _fingerprint(tokenizer) == files.fingerprint:
        (folder / TOKENIZER).write_bytes(files.text)
    place = folder / CONFIG
    written = json.loads(place.read_text("utf-8"))
    if (folder / TOKENIZER).is_file():
        written |= _of_the_file(tokenizer, {} if files is None else files.config)
    config = config_for_all(written, files)
    place.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", "utf-8")


def _of_the_file(tokenizer: Any, read: Mapping[str, Any]) -> dict[str, Any]:
    """The class that follows tokenizer.json in transformers 4 too, and what that class has otherwise by default."""
    adds = {flag: does for flag, does in _adds(tokenizer).items() if flag in read}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    first = json.loads(_state(backend, "pre_tokenizer") or "{}") if backend is not None else {}
    # transformers 4 changes this setting of the file's, where the configuration says otherwise or nothing.
    spaces = {name: value for name, value in first.items() if name == "add_prefix_space"}
    names = {"model_input_names": list(tokenizer.model_input_names), "padding_side": tokenizer.padding_side}
    return {"tokenizer_class": FAST, **names, **spaces, **adds}


def config_for_all(written: Mapping[str, Any], files: TokenizerFiles | None = None) -> dict[str, Any]:
    """tokenizer_config.json as transformers 5 has written it, with the names that transformers 4 reads.

    Fields of the file that was read stay where the written one has none. A class that transformers 4 lacks is the
    general one.

    >>> config_for_all({"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|im_end|>"]})
    {'tokenizer_class': 'PreTrainedTokenizerFast', 'additional_special_tokens': ['<|im_end|>']}
    """
    read: Mapping[str, Any] = {} if files is None else files.config
    left_out = ("chat_template", "extra_special_tokens")  # a template lies in a file of its own
    config = {name: value for name, value in read.items() if name not in left_out} | dict(written)
    config.pop("auto_map", None)  # code that is not there
    if config.get("tokenizer_class") == _VERSION_5:
        config["tokenizer_class"] = FAST
    named: dict[str, Any] = {}
    for tokens in (
        read.get("extra_special_tokens"),
        config.pop("extra_special_tokens", None),
        config.pop("model_specific_special_tokens", None),
    ):
        if isinstance(tokens, Mapping):
            named |= tokens
        elif tokens:
            config["additional_special_tokens"] = tokens
    return config | ({"extra_special_tokens": named} if named else {})
