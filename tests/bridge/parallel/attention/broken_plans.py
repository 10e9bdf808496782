"""Plans with a mistake: a test that a plan passes must see each of them."""

import dataclasses

from rl_bridge.parallel.attention.plan import rank_plan, segments_of


def no_documents(segments, rank, ranks, window=None):
    return rank_plan(segments_of([segments[-1].stop]), rank, ranks, window)


def own_keys_alone(segments, rank, ranks, window=None):
    plan = rank_plan(segments, rank, ranks, window)
    exchanges = tuple(e._replace(rectangles=(), triangles=()) for e in plan.exchanges)
    return dataclasses.replace(plan, exchanges=exchanges)


def squares_alone(segments, rank, ranks, window=None):
    return dataclasses.replace(own_keys_alone(segments, rank, ranks, window), rectangles=(), triangles=())


def one_key_less(segments, rank, ranks, window=None):
    plan = rank_plan(segments, rank, ranks, window)

    def shorter(rectangles):
        return tuple(r._replace(k_start=r.k_start + 1) for r in rectangles if r.k_start + 1 < r.k_stop)

    exchanges = tuple(e._replace(rectangles=shorter(e.rectangles)) for e in plan.exchanges)
    return dataclasses.replace(plan, rectangles=shorter(plan.rectangles), exchanges=exchanges)


def shifted_documents(segments, rank, ranks, window=None):
    """Every document boundary one token late."""
    total = segments[-1].stop
    stops = [min(segment.stop + 1, total) for segment in segments]
    lengths = [b - a for a, b in zip([0, *stops], stops, strict=False)]
    return rank_plan(segments_of([length for length in lengths if length > 0]), rank, ranks, window)


def windows_of_one_more(segments, rank, ranks, window=None):
    return rank_plan(segments, rank, ranks, None if window is None else window + 1)


def windows_along_the_row(segments, rank, ranks, window=None):
    """A window that begins again with each segment: what the segment continues is seen as it is without one."""
    plan = rank_plan(segments, rank, ranks, window)
    whole = rank_plan(segments, rank, ranks)
    return dataclasses.replace(whole, squares=plan.squares) if window is not None else whole


WINDOWED = ["windows_of_one_more", "windows_along_the_row"]
NAMES = ["no_documents", "own_keys_alone", "squares_alone", "one_key_less", "shifted_documents"]
