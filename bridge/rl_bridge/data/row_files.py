"""The files that a name means: those of a folder that hold rows, of one configuration and one split of a dataset.

A folder's ``README.md`` may declare configurations as datasets of the hub do, by ``configs:`` in its YAML head.
"""

import glob
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
UNREAD = (".ndjson", ".jsonlines", ".tsv", ".feather", ".orc", ".xlsx")
UNREAD += (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".tar", ".tgz")
"""Files that look like rows and have no reader: never passed over in silence."""
SAME_SPLIT = (
    ("train", "training"),
    ("test", "testing", "eval", "evaluation"),
    ("validation", "valid", "val", "dev"),
)
"""Words of one split, as the hub reads them: a word stands for the others where no file has the word itself."""
SPLITS = tuple(word for words in SAME_SPLIT for word in words)
"""Words by which a split is known where nobody has named one."""
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that ``datasets`` writes about a dataset."""
NAMES = 20
"""Configurations that an error names."""


class Files(NamedTuple):
    """The files of a source in their order."""

    paths: list[Path]
    part: str | None
    """The part of their rows that is read, as ``[10:20]``; None reads them all."""


def split_of(source: str) -> tuple[str, str | None]:
    """``PATH@SPLIT`` or ``NAME:SPLIT`` in two; a path that exists is one, whatever characters it has.

    >>> split_of("org/name/main@test[:10]"), split_of("rows.jsonl")
    (('org/name/main', 'test[:10]'), ('rows.jsonl', None))
    """
    if Path(source).exists():
        return source, None
    name, at, split = source.rpartition("@")
    if at and name and split:
        return name, split
    name, colon, split = source.partition(":")
    return (name, split) if colon and split and Path(name).suffix.lower() not in SUFFIXES else (source, None)


def is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote the folder."""
    described = all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))
    return described or (folder / "dataset_dict.json").is_file()


def files_of(source: str) -> Files | None:
    """The files that ``source`` names; None for what ``datasets`` reads: a saved dataset, or one of the hub.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file of no known kind, a folder without files of rows, a configuration or a split that is not
            there, or several of them of which none was named.
    """
    name, split = split_of(source)
    path = Path(name)
    if path.suffix.lower() in SUFFIXES and not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {source}")
        return Files([path], split)
    if path.is_dir() and is_saved(path):
        return None
    split_name, bracket, rest = (split or "").partition("[")
    part = bracket + rest or None
    for folder, configuration in ((path, None), (path.parent, path.name)):
        configurations = configurations_of(folder)
        if configuration in configurations or (configurations and configuration is None):
            chosen = _one_of(source, folder, configurations, configuration)
            declared = _Declared(source, folder, chosen, str(configurations[chosen].get("data_dir") or ""))
            return Files(declared.files(configurations[chosen], split_name or "train", part == "[:]"), part)
    if path.is_dir():
        # Rows of a part begin somewhere in the files, so that only the whole says that all files are meant.
        every = part == "[:]"
        return Files(_of_split(path, split_name, every) if split_name else _all(path, every), part)
    if path.is_file():
        reader = "; a reader of rows in Python is FILE.py:function" if path.suffix == ".py" else ""
        ends = ", ".join(SUFFIXES)
        raise ValueError(f"{source} is a file whose name does not end in {ends}: its kind is not known{reader}")
    return None


# Configurations that a README.md declares.


def configurations_of(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The configurations that ``README.md`` declares, by name; {} without any.

    Raises:
        ValueError: the head of the file cannot be read.
    """
    file = folder / "README.md"
    if not file.is_file():
        return {}
    # The head alone decides: a page without one needs no YAML.
    text = file.read_text("utf-8", errors="replace")
    if not re.match(r"\s*---", text) or "configs:" not in text:
        return {}
    import yaml
    from huggingface_hub.repocard import metadata_load

    try:
        configurations = (metadata_load(file) or {}).get("configs") or []
        return {str(configuration.get("config_name", "default")): configuration for configuration in configurations}
    except (yaml.YAMLError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{file}: configs in its YAML head cannot be read: {' '.join(str(error).split())}") from error


def _one_of(
    source: str, folder: Path, configurations: Mapping[str, Mapping[str, Any]], configuration: str | None
) -> str:
    """The configuration that was named, the only one, or the one that is the default."""
    if configuration is not None:
        return configuration
    defaults = [name for name, about in configurations.items() if about.get("default") or name == "default"]
    choice = list(configurations) if len(configurations) == 1 else defaults
    if len(choice) != 1:
        raise ValueError(_several(source, folder, "configurations", list(configurations)))
    return choice[0]


def _several(source: str, folder: Path, kind: str, names: Sequence[str], behind: str = "") -> str:
    """The error that one of ``names`` has to be named."""
    listed = ", ".join(names[:NAMES]) + (f" and {len(names) - NAMES} more" if len(names) > NAMES else "")
    example = f"{folder}@{names[0]}" if kind == "splits" else f"{folder}/{names[0]}@train"
    return f"{source} has {len(names)} {kind}, {listed}, which are not mixed unasked: name one, as {example}{behind}"


class _Declared(NamedTuple):
    """A configuration that a README.md declares."""

    source: str
    folder: Path
    configuration: str
    data_dir: str

    def files(self, about: Mapping[str, Any], split: str, asked_for: bool) -> list[Path]:
        """The files of a split, in the order of the patterns, which are of the ``data_dir`` where there is one."""
        declared = about.get("data_files")
        self._refuse_outside(self.data_dir)
        if declared is None:
            folder = self.folder / self.data_dir
            every = _data_files(folder)
            # Files without a split in their names are those to train on.
            plain = split == "train" and not _splits_in([file.relative_to(folder) for file in every])
            return _all(folder, asked_for) if plain and every else _of_split(folder, split, asked_for)
        splits: dict[str, list[str]] = {}
        for name, patterns in self._splits(declared):
            if name in splits:
                raise ValueError(f"{self._place}: data_files of {self._name} have two entries of the split {name!r}")
            splits[name] = patterns
        if split not in splits:
            names = ", ".join(map(repr, splits))
            raise ValueError(f"{self.source}: the configuration {self._name} has no split {split!r}; it has {names}")
        files: dict[Path, None] = {}
        for pattern in splits[split]:
            matches = self._matches(pattern)
            if not matches:
                raise ValueError(f"{self._place} names {pattern!r} for {self._name}, and there is no such file")
            for file in matches:
                if file.suffix.lower() not in SUFFIXES:
                    raise ValueError(f"{file}, a file of {self._name}, does not end in {', '.join(SUFFIXES)}")
                files[file] = None
        return _readable(list(files), asked_for)

    def _splits(self, declared: Any) -> Iterator[tuple[str, list[str]]]:
        """Split → patterns of its files."""
        entries = declared if isinstance(declared, list) else [declared]
        if entries and all(isinstance(entry, str) for entry in entries):
            yield "train", entries
            return
        for entry in entries:
            paths = entry.get("path") if isinstance(entry, Mapping) else None
            paths = [paths] if isinstance(paths, str) else paths
            if not (isinstance(entry, Mapping) and isinstance(paths, list) and all(isinstance(p, str) for p in paths)):
                raise ValueError(f"{self._place}: data_files of {self._name} need a split and a path, got {entry!r}")
            yield str(entry.get("split", "train")), paths

    def _matches(self, pattern: str) -> list[Path]:
        self._refuse_outside(pattern)
        folder = self.folder / self.data_dir
        # Path.glob passes over linked folders.
        matches = (folder / match for match in glob.iglob(pattern, root_dir=folder, recursive=True))
        return sorted(file for file in matches if not file.is_dir() and not _is_hidden(file, self.folder))

    def _refuse_outside(self, pattern: str) -> None:
        if pattern.startswith("/") or ".." in PurePath(pattern).parts or "://" in pattern:
            raise ValueError(f"{self._place}: {pattern!r} of {self._name} is not in the folder")

    @property
    def _name(self) -> str:
        return repr(self.configuration)

    @property
    def _place(self) -> str:
        return str(self.folder / "README.md")


# Folders of files that nothing describes.


class _Place(NamedTuple):
    """Where the path of a file has the word of a split: the first folder or file whose name has it."""

    above: PurePath
    """The folders above, which are no part of the split: configurations."""
    name: str
    below: PurePath
    """The path below a folder of the split; empty where the file itself has the word."""
    stem: str
    """The name without suffix and numbers of shards: ``train_sft`` of ``train_sft-00000-of-00002.parquet``."""


def _of_split(folder: Path, split: str, asked_for: bool) -> list[Path]:
    """The files of a split: those whose names have its word, or that are in a folder whose name has it.

    Several folders with this split, and names that differ by more than numbers, have to be ``asked_for``. The name
    that is the split's alone needs no asking: ``train.jsonl`` beside ``train_sft.jsonl`` is ``train``.
    """
    source = f"{folder}@{split}"
    files = _data_files(folder)
    places, word = _places(files, folder, split), split
    if not places:
        words = next((words for words in SAME_SPLIT if split in words), ())
        others = [word for word in words if _places(files, folder, word)]
        if len(others) > 1:
            raise ValueError(_several(source, folder, "splits", others))
        word = others[0] if others else split
        places = _places(files, folder, word)
    if not places:
        raise ValueError(f"{folder} has no file of the split {split!r} that ends in {', '.join(SUFFIXES)}")
    if asked_for:
        return _readable(list(places), asked_for)
    behind = f"; {source}[:] is all {len(places)} files"
    places = {file: place for file, place in places.items() if place.stem == word} or places
    _refuse_folders(source, folder, list(places.values()), behind)
    stems = sorted({place.stem for place in places.values()})
    if len(stems) > 1:
        raise ValueError(_several(source, folder, "splits", stems, behind))
    folders = sorted({folder / place.above / place.name for place in places.values() if place.below.parts})
    if not folders:
        return _readable(list(places), asked_for)
    if alone := [file for file, place in places.items() if not place.below.parts]:
        both = f"the folder {folders[0]} and the file {alone[0]}"
        raise ValueError(f"{source} is {both}, which are not mixed unasked: name one{behind}")
    # What is in a folder of the split may again be splits: "main" of folder@main is a configuration.
    return _once([file for inside in folders for file in _all(inside, asked_for)])


def _all(folder: Path, asked_for: bool) -> list[Path]:
    """All files of rows in a folder. Several splits or configurations have to be ``asked_for``."""
    files = _data_files(folder)
    if not files:
        raise ValueError(f"{folder} has no file that ends in {', '.join(SUFFIXES)}")
    splits = _splits_in([file.relative_to(folder) for file in files])
    if asked_for or not splits:
        return _readable(files, asked_for)
    _refuse_unread(files)
    behind = f"; {folder}@[:] is all {len(files)} files"
    by_split = [list(_places(files, folder, split).values()) for split in splits]
    below = [place for places in by_split for place in places if place.above.parts]
    for places in (below, *by_split):
        _refuse_folders(str(folder), folder, places, behind)
    if len(splits) > 1:
        raise ValueError(_several(str(folder), folder, "splits", splits, behind))
    of_split = _of_split(folder, splits[0], asked_for)
    chosen = {file.resolve() for file in of_split}
    if others := [file for file in files if file.resolve() not in chosen]:
        raise ValueError(
            f"{folder} has files of the split {splits[0]!r} and {len(others)} others, as {others[0]}, which are not "
            f"mixed unasked: name a file or the split, as {folder}@{splits[0]}{behind}"
        )
    return of_split


def _refuse_folders(source: str, folder: Path, places: Sequence[_Place], behind: str) -> None:
    """Refuse files of one split that are in several folders; the folder at the top is one of them."""
    # The example of the error is a folder below.
    above = sorted({place.above for place in places}, key=lambda path: (not path.parts, path))
    if len(above) > 1:
        names = [str(path) if path.parts else f"{folder} itself (name its file)" for path in above]
        raise ValueError(_several(source, folder, "folders of one split", names, behind))


def _readable(files: list[Path], asked_for: bool) -> list[Path]:
    """The files, each once; those that cannot be read are refused, and rows that are there in two forms."""
    _refuse_unread(files)
    files = _once(files)
    forms: dict[tuple[Path, str], tuple[tuple[str, str], Path]] = {}
    for file in files:
        name, _, shards = _SHARDS.sub(r"/\1", file.stem).partition("/")
        form = (file.suffix.lower(), shards)
        first_form, first = forms.setdefault((file.parent, name), (form, file))
        if form != first_form and not asked_for:
            raise ValueError(
                f"{first} and {file} are two forms of one name, so that rows may be there twice: name one of the "
                "files, or move the other elsewhere"
            )
    if not asked_for:
        _refuse_copies(files)
    return files


def _refuse_copies(files: Sequence[Path]) -> None:
    """Refuse a file that is there twice, as in a folder of backups: each of its rows would be, too."""
    by_size: dict[int, list[Path]] = {}
    for file in files:
        by_size.setdefault(file.stat().st_size, []).append(file)
    for alike in by_size.values():
        if len(alike) > 1 and alike[0].stat().st_size:
            contents: dict[str, Path] = {}
            for file in alike:
                with file.open("rb") as content:
                    mark = hashlib.file_digest(content, "sha256").hexdigest()
                if (first := contents.setdefault(mark, file)) is not file:
                    raise ValueError(
                        f"{first} and {file} have the same content, so that each row is there twice: name one of the "
                        "files, or move the other elsewhere"
                    )


def _once(files: Sequence[Path]) -> list[Path]:
    """The files; one that links give several names has the first."""
    names: dict[Path, Path] = {}
    for file in files:
        names.setdefault(file.resolve(), file)
    return list(names.values())


def _refuse_unread(files: Sequence[Path]) -> None:
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} is a link to a file that is not there")
        if file.suffix.lower() not in SUFFIXES:
            raise ValueError(
                f"{file} looks like rows and has no reader: unpack or rewrite it as a file that ends in "
                f"{', '.join(SUFFIXES)}, move it elsewhere, or name the files that are to be read"
            )


def _data_files(folder: Path) -> list[Path]:
    """Files of rows, by name: no hidden ones, and none that describes a dataset or is a cache of ``datasets``."""
    return sorted(file for file in _files_in(folder) if not _is_no_data(file))


def _files_in(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """The files below that look like rows, linked folders included; a link to a folder above is passed over."""
    folder_itself = folder.resolve()
    if not folder.is_dir() or any(folder_itself == other or folder_itself in other.parents for other in above):
        return
    for entry in folder.iterdir():
        if _is_hidden(entry, folder):
            continue
        if entry.is_dir():
            yield from _files_in(entry, (*above, folder_itself))
        elif entry.suffix.lower() in SUFFIXES + UNREAD and (entry.is_file() or entry.is_symlink()):
            yield entry


def _is_hidden(file: Path, folder: Path) -> bool:
    """Whether the file, or a folder between, has a name as those of tools: ``.git``, ``._rows.csv``, ``__MACOSX``."""
    return any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)


def _is_no_data(file: Path) -> bool:
    if file.name in DESCRIPTIONS and file.is_file():
        with file.open("rb") as stream:
            return stream.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    described = any((file.parent / name).is_file() for name in ("state.json", "dataset_info.json"))
    return file.name.startswith("cache-") and file.suffix == ".arrow" and described


def _places(files: Sequence[Path], folder: Path, split: str) -> dict[Path, _Place]:
    """The files of a split, each with its place."""
    places = ((file, _place_of(file.relative_to(folder), split)) for file in files)
    return {file: place for file, place in places if place}


def _place_of(path: PurePath, split: str) -> _Place | None:
    """The place of a split in a path; None for a file of no such split.

    >>> _place_of(PurePath("main/gsm_train-00000-of-00002.csv"), "train").stem
    'gsm_train'
    >>> _place_of(PurePath("trainer.csv"), "train")
    """
    # A word ends where the letters end, and a name that ends in a number where the number ends.
    end = r"(?![^\W_])" if split[-1:].isdigit() else r"(?![^\W\d_])"
    word = re.compile(rf"(?<![^\W\d_]){re.escape(split)}{end}", re.IGNORECASE)
    for depth, name in enumerate(path.parts):
        is_file = depth == len(path.parts) - 1
        stem = _without_suffixes(name) if is_file else name
        if match := word.search(stem):
            stem = _without_numbers(stem[: match.start()]) + match[0] + _without_numbers(stem[match.end() :])
            return _Place(PurePath(*path.parts[:depth]), name, PurePath(*path.parts[depth + 1 :]), stem)
    return None


def _splits_in(paths: Sequence[PurePath]) -> list[str]:
    """The known splits of which there are files."""
    return [split for split in SPLITS if any(_place_of(path, split) for path in paths)]


def _without_suffixes(name: str) -> str:
    while (suffix := PurePath(name).suffix.lower()) in SUFFIXES + UNREAD and suffix:
        name = name[: -len(suffix)]
    return name


def _without_numbers(text: str) -> str:
    """A name without the numbers of shards.

    >>> _without_numbers("rows-00000-of-00001"), _without_numbers("rows.part3"), _without_numbers("rows-5k")
    ('rows', 'rows', 'rows-5k')
    """
    return _SHARD.sub("", text)


_SHARD = re.compile(
    r"[-._ ]*(?<![^\W_])(?:(?:part|shard|chunk)[-._ ]?)?\d+(?:[-._ ]of[-._ ]\d+)?(?:-[0-9a-f]{16})?(?![^\W_])",
    re.IGNORECASE,
)
"""A shard's number, as in ``-00000-of-00002`` or ``.part3``; datasets of the hub have had a hash behind it."""
_SHARDS = re.compile(r"-\d+-of-(\d+)(?:-[0-9a-f]{16})?$")
"""A file's number among the files of one name, and how many there are."""
