"""Memory that is short at a chosen call."""

SHORT = "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


def fails(method, at: int):
    """``method`` raises at its call number ``at``, after it has done its work."""
    calls = iter(range(1_000_000))

    def call(*args, **kwargs):
        result = method(*args, **kwargs)
        if next(calls) == at:
            raise RuntimeError(SHORT)
        return result

    return call
