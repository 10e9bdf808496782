"""Oracle of packed rows: plain lists."""


def segment_ids(lengths, *, size):
    ids = [i for i, length in enumerate(lengths) for _ in range(length)]
    return ids + [len(lengths)] * (size - len(ids))


def position_ids(lengths, *, size):
    positions = [p for length in lengths for p in range(length)]
    return positions + list(range(size - len(positions)))


def zigzag_split(tokens, ranks):
    chunk = len(tokens) // (2 * ranks)
    chunks = [tokens[i * chunk : (i + 1) * chunk] for i in range(2 * ranks)]
    return [[*chunks[r], *chunks[2 * ranks - 1 - r]] for r in range(ranks)]
