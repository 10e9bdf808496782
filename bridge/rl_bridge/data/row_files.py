"""The files that a name means: those of a folder that hold rows, of one configuration and one split of a dataset.

A folder's ``README.md`` may declare configurations as datasets of the hub do, by ``configs:`` in its YAML head.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Names by which a split is known where nobody has named one."""
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
            declared = _Declared(source, folder, _one_of(source, folder, configurations, configuration))
            return Files(declared.files(configurations[declared.configuration], split_name or "train"), part)
    if path.is_dir():
        return Files(
            _of_split(path, split_name, part is not None) if split_name else _all(path, split is not None), part
        )
    if path.is_file():
        raise ValueError(f"{source} is a file whose name does not end in {', '.join(SUFFIXES)}: its kind is not known")
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

    def files(self, about: Mapping[str, Any], split: str) -> list[Path]:
        """The files of a split, in the order of the patterns."""
        declared = about.get("data_files")
        if declared is None:
            folder = self.folder / str(about.get("data_dir", ""))
            every = _data_files(folder)
            # Files without a split in their names are those to train on.
            plain = split == "train" and not _splits_in([file.relative_to(folder) for file in every])
            return every if plain and every else _of_split(folder, split, asked_for=False)
        splits = dict(self._splits(declared))
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
        return list(files)

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
        parts = PurePath(pattern).parts
        if pattern.startswith("/") or ".." in parts or "://" in pattern:
            raise ValueError(f"{self._place}: {pattern!r} of {self._name} is not in the folder")
        matches = self.folder.glob(f"{pattern}/*" if parts[-1:] == ("**",) else pattern)
        return sorted(file for file in matches if file.is_file() and not _is_hidden(file, self.folder))

    @property
    def _name(self) -> str:
        return repr(self.configuration)

    @property
    def _place(self) -> str:
        return str(self.folder / "README.md")


# Folders of files that nothing describes.


def _of_split(folder: Path, split: str, asked_for: bool) -> list[Path]:
    """The files of a split: those in a folder of its name, or whose names begin with it.

    Several folders of this split have to be ``asked_for``.
    """
    places = {file: place for file in _data_files(folder) if (place := _place_of(file.relative_to(folder), split))}
    if not places:
        raise ValueError(f"{folder} has no file of the split {split!r} that ends in {', '.join(SUFFIXES)}")
    above = sorted({str(place[0]) for place in places.values()} - {"."})
    if len(above) > 1 and not asked_for:
        behind = f"; {folder}@{split}[:] is all {len(places)} files"
        raise ValueError(_several(f"{folder}@{split}", folder, "folders of one split", above, behind))
    below = _splits_in([place[1] for place in places.values()])
    if len(below) > 1 and not asked_for:
        inside = folder / next(iter(places.values()))[0] / split
        raise ValueError(_several(f"{folder}@{split}", inside, "splits", below))
    return list(places)


def _all(folder: Path, asked_for: bool) -> list[Path]:
    """All files of rows in a folder. Several splits or configurations have to be ``asked_for``."""
    files = _data_files(folder)
    if not files:
        raise ValueError(f"{folder} has no file that ends in {', '.join(SUFFIXES)}")
    if not asked_for:
        paths = [file.relative_to(folder) for file in files]
        splits = _splits_in(paths)
        above = {str(place[0]) for split in splits for path in paths if (place := _place_of(path, split))} - {"."}
        behind = f"; {folder}@[:] is all {len(files)} files"
        if len(above) > 1:
            raise ValueError(_several(str(folder), folder, "folders of one split", sorted(above), behind))
        if len(splits) > 1:
            raise ValueError(_several(str(folder), folder, "splits", splits, behind))
    return files


def _data_files(folder: Path) -> list[Path]:
    """Files of rows, by name: no hidden ones, and none that describes a dataset or is a cache of ``datasets``."""
    files = (file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    return sorted(file for file in files if not _is_hidden(file, folder) and not _is_no_data(file))


def _is_hidden(file: Path, folder: Path) -> bool:
    """Whether the file, or a folder between, has a name as those of tools: ``.git``, ``._rows.csv``, ``__MACOSX``."""
    return any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)


def _is_no_data(file: Path) -> bool:
    if file.name in DESCRIPTIONS:
        with file.open("rb") as stream:
            return stream.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    return file.name.startswith("cache-") and file.suffix == ".arrow" and (file.parent / "state.json").is_file()


def _place_of(path: PurePath, split: str) -> tuple[PurePath, PurePath] | None:
    """The parts of a path above and below its split; None for a file of no such split.

    >>> _place_of(PurePath("main/train/a.csv"), "train"), _place_of(PurePath("trainer.csv"), "train")
    ((PurePosixPath('main'), PurePosixPath('a.csv')), None)
    """
    parts = path.parts
    if split in parts[:-1]:
        place = parts.index(split)
        return PurePath(*parts[:place]), PurePath(*parts[place + 1 :])
    return (path.parent, PurePath()) if re.match(rf"{re.escape(split)}(?![^\W_])", path.name) else None


def _splits_in(paths: Sequence[PurePath]) -> list[str]:
    """The known splits of which there are files."""
    return [split for split in SPLITS if any(_place_of(path, split) for path in paths)]
