"""A class of the user's own is found in its file, and looked at before a model is made: what it lacks is named."""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_bridge.common.random_numbers import drawing_from, generators
from rl_bridge.common.user_files import callable_in, told

FORWARD = "forward(self, input_ids, position_ids, attention_mask=None) → logits [N, T, V]"
_PARAMETERS = ("input_ids", "position_ids", "attention_mask")
_TAKEN = "_rl_fn_taken"
Factory = Callable[[], nn.Module]
"""A class, or a function without arguments, that makes the module."""


@dataclass(frozen=True)
class FileFactory:
    """A class or function of a file, which makes the module. It is pickled by the path, which each worker must see."""

    path: str
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self) -> nn.Module:
        """A new module."""
        return self.loaded()()

    def loaded(self) -> Any:
        """The class, whose file is run once in a process."""
        return callable_in(self.path, self.name, "model", "class or function {!r} that makes a model")


_FILE = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


def is_file_of_class(name: str) -> bool:
    """Whether a model's name is ``FILE.py:Class``."""
    return _FILE.fullmatch(name) is not None


def factory_of(name: str) -> FileFactory:
    """The class ``FILE.py:Class``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file fails to load, or has no such class.
    """
    match = _FILE.fullmatch(name)
    if match is None:
        raise ValueError(f"a model class is named FILE.py:Class, got {name!r}")
    factory = FileFactory(str(Path(match[1]).resolve()), match[2])
    factory.loaded()
    return factory


# What every class has.


def require_form(logits: Any, ids: Tensor, name: str) -> Tensor:
    """The logits, if they are [N, T, V] of a floating-point type for ``ids`` [N, T]. Raises ValueError otherwise."""
    if not isinstance(logits, Tensor):
        raise ValueError(f"{name}.forward returns logits, a tensor [N, T, V], got {type(logits).__name__}")
    if logits.dim() != 3 or logits.shape[:2] != ids.shape or not logits.is_floating_point():
        raise ValueError(
            f"{name}.forward returns logits [N, T, V] of a floating-point type: for ids {list(ids.shape)} it gave "
            f"{str(logits.dtype).removeprefix('torch.')} {list(logits.shape)}"
        )
    return logits


def name_of(factory: Factory) -> str:
    """The name of the class, as errors have it."""
    function = factory.func if isinstance(factory, functools.partial) else factory
    return getattr(function, "__name__", type(function).__name__)


def made_by(factory: Factory) -> nn.Module:
    """A new module on torch's default device, in float32, in evaluation mode.

    Raises:
        TypeError: the class takes arguments, makes no module, or its ``forward`` has other parameters.
        ValueError: it fails, has no parameter, one of a module that it made before, or parts that torch does not see.
    """
    name = name_of(factory)
    _require_no_arguments(factory)
    try:
        with drawing_from(generators()):  # a program that draws goes on as if no model had been made
            module = factory()
    except Exception as error:
        if "Module.__init__()" in str(error):
            raise TypeError(f"{name}.__init__ begins with super().__init__(): {error}") from error
        on_meta = isinstance(error, RuntimeError) and torch.get_default_device().type == "meta"
        place = " on the meta device, where an engine makes models before they have values" if on_meta else ""
        raise ValueError(f"{name} cannot be made{place}: {told(error)}") from error
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name}() makes a torch.nn.Module, got {type(module).__name__}")
    _require_parts(module, name)
    for path, parameter in module.named_parameters():
        if parameter.is_complex():
            way_on = "give it real and imaginary parts as two, or as one by torch.view_as_real"
            raise ValueError(f"{name} has a parameter {path!r} of complex numbers, which would lose one part: {way_on}")
        if getattr(parameter, _TAKEN, False):
            way_on = "policy and reference would be one: make it anew each time, or copy.deepcopy it"
            raise ValueError(f"{name} gives the parameter {path!r} that it gave before: {way_on}")
        setattr(parameter, _TAKEN, True)
        # The class may have made it of a tensor that the program has elsewhere.
        kind = torch.float32 if parameter.is_floating_point() else parameter.dtype
        parameter.data = parameter.data.to(kind, copy=True)
    return module.eval()


def _require_no_arguments(factory: Factory) -> None:
    """Refuse a module, and a class that cannot be called without arguments; one of a file by its file."""
    of_file = isinstance(factory, FileFactory)
    maker = factory.loaded() if of_file else factory
    name = f"{factory.name} of {factory.path}" if of_file else name_of(factory)
    if isinstance(maker, nn.Module):
        kind = type(maker).__name__
        name, way_on = (name, f"{factory.path}:{kind}") if of_file else (kind, "which workers make")
        raise TypeError(f"{name} is a module that is made: give its class, {way_on}")
    if not callable(maker):
        raise TypeError(f"a model class makes a torch.nn.Module when it is called, got {factory!r:.80}")
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in _signature(maker) if p.default is p.empty and p.kind not in optional]
    if required:
        arguments = ", ".join(f"{argument}=…" for argument in required)
        way_on = f"functools.partial({name}, {arguments}), or a function that makes the model"
        if of_file:
            way_on = f"default values, or the name of a function there that returns {factory.name}({arguments})"
        raise TypeError(f"{name} is made without arguments, and needs {', '.join(required)}: give {way_on}")


def _require_parts(module: nn.Module, name: str) -> None:
    """Refuse a module that lacks what ``OwnLanguageModel`` has."""
    parameters = _signature(module.forward)
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    lacking = [] if any_name else [parameter for parameter in _PARAMETERS if parameter not in names]
    if type(module).forward is nn.Module.forward:
        raise TypeError(f"{name} lacks forward: a model of your own has {FORWARD}")
    if lacking:
        raise TypeError(f"{name}.forward lacks {', '.join(lacking)}: a model of your own has {FORWARD}")
    _require_registered(module, name)
    if next(module.parameters(), None) is None:
        raise ValueError(f"{name} has no parameter, so that there is nothing to train")
    positions = getattr(module, "max_positions", None)
    if positions is not None and (type(positions) is not int or positions < 1):
        raise ValueError(
            f"{name}.max_positions is the most tokens of a row, a whole number from 1 on, or is left out: got "
            f"{positions!r:.80}"
        )


def _signature(function: Any) -> list[inspect.Parameter]:
    """The parameters; none where they cannot be read, as of a function in C."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def _require_registered(module: nn.Module, name: str) -> None:
    """Refuse tensors and layers that torch does not see: on the meta device they have no values, and keep none."""
    seen_by_torch = {id(part) for part in (*module.modules(), *module.parameters())}
    for path, part in module.named_modules():
        for attribute, value in vars(part).items():
            where = f"{path}.{attribute}" if path else attribute
            if isinstance(value, Tensor):
                raise ValueError(
                    f"{name} has a tensor {where!r} that is no buffer, and would stay where it was made: "
                    f"self.register_buffer({attribute!r}, …, persistent=False)"
                )
            for inner in _inside(value):
                if id(inner) not in seen_by_torch:
                    kind = "Module" if isinstance(inner, nn.Module) else "Parameter"
                    form = f"nn.{kind}{'Dict' if isinstance(value, dict) else 'List'}"
                    raise ValueError(
                        f"{name} has a {kind.lower()} in {where!r}, a plain {type(value).__name__}, where torch does "
                        f"not see it: it would not be trained, moved or saved; self.{attribute} = {form}(…)"
                    )


def _inside(value: Any) -> Iterator[nn.Module | nn.Parameter]:
    """Modules and parameters in lists, tuples and dictionaries, however deep."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        if isinstance(inner, nn.Module | nn.Parameter):
            yield inner
        else:
            yield from _inside(inner)


def vocabulary_of(factory: Factory) -> int:
    """V, the number of logits that a module of the class gives a token; the class is checked on the way.

    Two tokens are read on the meta device, where nothing is computed, or on the CPU by code that reads values.

    Raises:
        TypeError, ValueError: with the name of the class and what it lacks or returns.
    """
    name, error = name_of(factory), Exception()
    for device in ("meta", "cpu"):
        with torch.device(device), torch.no_grad(), torch.random.fork_rng(devices=[]):
            module = made_by(factory)
            ids = torch.zeros((1, 2), dtype=torch.int64)
            positions = torch.arange(2)[None]
            try:
                logits = module(input_ids=ids, position_ids=positions, attention_mask=None)
            except Exception as raised:  # Whatever the user's code raises.
                error = raised
                continue
            return require_form(logits, ids, name).shape[-1]
    raise ValueError(f"{name} cannot read a row of two tokens as {FORWARD}: {told(error)}") from error
