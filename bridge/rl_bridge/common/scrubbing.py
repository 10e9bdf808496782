"""Texts that leave the machine lose what must stay: passwords, tokens, keys, credentials in addresses."""

import itertools
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

HIDDEN = "***"
_WORDS = {"secret", "secrets", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "apikey", "auth"}
_WORDS |= {"authorization", "cookie", "bearer", "dsn", "jwt", "netrc", "signature"}
_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("account", "key"), ("ssh", "key")}
_PAIRS |= {("connection", "string"), ("encryption", "key"), ("signing", "key"), ("write", "key"), ("license", "key")}
_VARIABLE = {"key", "keys", "token", "tokens", "pat", "sig"}
"""Words that make a variable of the environment, or a part of an address, a secret."""
_MARKS = {"bos", "cls", "end", "eos", "image", "mask", "pad", "sep", "special", "start", "stop", "think", "unk"}
"""Words before ``token`` where it is one of a vocabulary."""
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:sk|pk|rk)-[\w-]{16,}|\bgh[opusr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bglpat-[\w-]{16,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bxox[abeoprs]-[\w-]{10,}|\bAIza[\w-]{30,}"
    r"|\bwandb_v\d_\w{16,}|\bdapi[0-9a-f]{32}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    flags=re.DOTALL,
)
_USER = re.compile(r"(\b[a-z][a-z0-9+.-]{0,40}://)[^/\s'\"<>]+@", flags=re.IGNORECASE)
_QUERY = re.compile(r"([?&;])([\w.~%-]+)=([^&;\s'\"<>#]+)")
_BEARER = re.compile(r"\b(bearer|basic|token)(:?\s+)[\w.~+/=-]{12,}", flags=re.IGNORECASE)
# A name begins where the word begins: from each of its characters on, a long text would be read again.
_NAMED = re.compile(r"(?<![\w.-])([\w.-]+)\s*[=:]\s*")
_VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|[^\s&;,'\"]+")
_SHORTEST = 6
"""Characters of a value in the environment that is hidden wherever it stands; a shorter one is a word of its own."""


def is_secret_name(name: str) -> bool:
    """Whether what has this name is not to be shown.

    >>> [is_secret_name(name) for name in ("HF_TOKEN", "wandb.apiKey", "max_tokens", "pad_token_id", "learning_rate")]
    [True, True, False, False, False]
    """
    words = _words_of(name)
    pairs = set(itertools.pairwise(words))
    # max_tokens counts tokens and pad_token_id is one: a name that ends in the word says that its value is a secret.
    is_token = words[-1:] == ["token"] and _MARKS.isdisjoint(words[-2:-1])
    return bool(_WORDS.intersection(words) or _PAIRS & pairs or is_token)


def is_secret_variable(name: str) -> bool:
    """Whether a variable of the environment, or a part of an address, holds what is not to be shown.

    >>> [is_secret_variable(name) for name in ("VLLM_ADMIN_KEY", "HF_PAT", "OMP_NUM_THREADS")]
    [True, True, False]
    """
    return is_secret_name(name) or not _VARIABLE.isdisjoint(_words_of(name))


def _words_of(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def scrubbed_text(text: str, values: Iterable[str] = ()) -> str:
    """A text without credentials in addresses, known shapes of tokens, assignments to secret names, and ``values``.

    >>> scrubbed_text("git clone https://me:abc@host/x?token=1234&y=1 --hub-token=123456 HF_TOKEN=abcdef")
    'git clone https://***@host/x?token=***&y=1 --hub-token=*** HF_TOKEN=***'
    """
    for value in values:
        text = text.replace(value, HIDDEN)
    text = _USER.sub(rf"\1{HIDDEN}@", text)
    text = _QUERY.sub(lambda m: f"{m[1]}{m[2]}={HIDDEN if is_secret_variable(m[2]) else m[3]}", text)
    text = _SHAPES.sub(HIDDEN, text)
    text = _BEARER.sub(rf"\1\2{HIDDEN}", text)
    parts, place = [], 0
    while named := _NAMED.search(text, place):
        value = _VALUE.match(text, named.end()) if is_secret_name(named[1]) else None
        # The value of a plain name, such as an address, may have secret names inside.
        parts.append(text[place : named.end()] + (HIDDEN if value else ""))
        place = value.end() if value else named.end()
    return "".join([*parts, text[place:]])


def scrubbed_path(address: str) -> str:
    """Path and query of an address: what a gateway chooses by. The host may move, and a key may be renewed.

    >>> scrubbed_path("http://10.0.0.1:8000/chess?level=2&token=1234") == scrubbed_path("https://gw/chess?level=2&token=5")
    True
    """
    parts = urllib.parse.urlsplit(address)
    return scrubbed_text(f"{parts.path or '/'}?{parts.query}")


def scrubbed(value: Any, name: str = "", values: Sequence[str] | None = None) -> Any:
    """A value of JSON with every text in it, keys included, scrubbed; what a secret name has is hidden whole.

    ``values``: what is hidden wherever it stands; without them the environment's secrets.

    >>> scrubbed({"rate": 0.5, "api_key": "abc", "hub": {"url": "https://u:p@h"}}, values=())
    {'rate': 0.5, 'api_key': '***', 'hub': {'url': 'https://***@h'}}
    """
    values = environment_secrets() if values is None else values
    if isinstance(value, Mapping):
        return {scrubbed_text(str(key), values): scrubbed(part, str(key), values) for key, part in value.items()}
    if name and is_secret_name(name) and value is not None and not isinstance(value, bool):
        return HIDDEN
    if isinstance(value, list | tuple):
        return [scrubbed(part, "", values) for part in value]
    return scrubbed_text(value, values) if isinstance(value, str) else value


def scrubbed_words(words: Sequence[str]) -> list[str]:
    """A command line: the word after an option with a secret name is hidden too.

    >>> scrubbed_words(["train", "--hub-token", "abc", "--steps", "3"])
    ['train', '--hub-token', '***', '--steps', '3']
    """
    values = environment_secrets()
    words_out: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        hidden = before.startswith("-") and "=" not in before and is_secret_name(before) and not word.startswith("--")
        words_out.append(HIDDEN if hidden else scrubbed_text(word, values))
    return words_out


def is_shown_as(text: str, shown: str) -> bool:
    """Whether ``shown`` is the text, some of which may be hidden: what an environment hides is no difference.

    >>> [is_shown_as("/data/model", shown) for shown in ("***/model", "/data/model", "***/rows")]
    [True, True, False]
    """
    pattern = ".+".join(map(re.escape, shown.split(HIDDEN)))
    return text == shown or (HIDDEN in shown and re.fullmatch(pattern, text, re.DOTALL) is not None)


def environment_secrets() -> tuple[str, ...]:
    """Values of this process's environment that have a secret name, the longest first; credentials in addresses too."""
    return _secrets_of(tuple(sorted(os.environ.items())))


@lru_cache(maxsize=1)
def _secrets_of(environment: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    # PWD is where the shell is; a path, as of a socket or a file of credentials, is no secret itself.
    named = [value for name, value in environment if name != "PWD" and is_secret_variable(name)]
    secrets = {value for value in named if not (value.startswith("/") and os.path.exists(value))}
    for _, value in environment:
        secrets.update(part for user in re.findall(r"://([^/\s@]+)@", value) for part in user.split(":", 1)[1:])
    return tuple(
        sorted((value for value in secrets if len(value) >= _SHORTEST), key=lambda value: (-len(value), value))
    )
