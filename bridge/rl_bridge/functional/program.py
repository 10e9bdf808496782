"""A jaxpr as one compiled Python function over torch tensors."""

import itertools
import linecache
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from rl_bridge.functional import rules
from rl_bridge.functional.dtypes import jax_dtype
from rl_bridge.functional.emitter import Builder, Value
from rl_bridge.functional.trace import Traced

assert rules  # importing it fills the table of lowerings
_NUMBER = itertools.count()


class Program:
    """Calls with the traced arguments, returns the result as the function would: `program(*tensors)`."""

    def __init__(self, traced: Traced, dtypes: Sequence[torch.dtype], name: str):
        builder = Builder(who=name)
        names = [builder.fresh() for _ in dtypes]
        avals = traced.closed.in_avals
        values = [
            Value(n, tuple(a.shape), np.dtype(a.dtype), tuple(a.shape), None, True)
            for n, a in zip(names, avals, strict=True)
        ]
        narrow = []
        for i, (value, dtype) in enumerate(zip(values, dtypes, strict=True)):
            if jax_dtype(dtype) != value.dtype:
                narrow.append(f"{value.code} = rt.narrow({value.code}, {i})")
        results = builder.run(traced.closed, values)
        identifier = "lowered_" + re.sub(r"\W", "_", name)  # a prefix: the function may be called abs
        body = builder.source(identifier, names, results, len(results), ["@PRELUDE"])
        prelude = [f"device = {names[0]}.device", *self._sizes(traced, builder, names), *narrow]
        prelude += [line for function in builder.functions for line in function.split("\n")]
        self.source = body.replace("    @PRELUDE", "\n".join(f"    {line}" for line in prelude))
        filename = f"<from_jax {name} {next(_NUMBER)}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        exec(compile(self.source, filename, "exec"), builder.namespace)
        self._function = builder.namespace[identifier]
        self._tree, self._static = traced.tree, traced.static
        self._symbols, self._namespace = traced.symbols, builder.namespace
        self.under(())

    def under(self, conditions: Sequence[str]) -> "Program":
        """The program, for sizes that make all of the conditions true."""
        self._conditions = compile(" and ".join(conditions) or "True", "<sizes>", "eval")
        return self

    @staticmethod
    def _sizes(traced: Traced, builder: Builder, names: Sequence[str]) -> list[str]:
        lines = []
        for symbol in traced.symbols:
            where = next(
                (name, axis)
                for name, aval in zip(names, traced.closed.in_avals, strict=True)
                for axis, size in enumerate(aval.shape)
                if str(size) == symbol
            )
            lines.append(f"{symbol} = {where[0]}.shape[{where[1]}]")
        return lines + [f"{name} = {text}" for text, name in builder.dims.items()]

    def allows(self, sizes: Sequence[Any]) -> bool:
        """Whether the program is right for these sizes."""
        return bool(eval(self._conditions, self._namespace, dict(zip(self._symbols, sizes, strict=True))))

    def __call__(self, *tensors: torch.Tensor) -> Any:
        results = self._function(*tensors)
        if self._static:
            rest = iter(results)
            count = len(results) + len(self._static)
            results = [self._static[i] if i in self._static else next(rest) for i in range(count)]
        return jax.tree.unflatten(self._tree, results)
