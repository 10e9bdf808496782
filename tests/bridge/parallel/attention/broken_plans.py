"""Plans with a mistake: a test that a plan passes must see each of them."""

import dataclasses

from rl_bridge.parallel.attention.plan import rank_plan, segments_of


def no_documents(segments, rank, ranks):
    return rank_plan(segments_of([segments[-1].stop]), rank, ranks)


def own_keys_alone(segments, rank, ranks):
    plan = rank_plan(segments, rank, ranks)
    exchanges = tuple(e._replace(rectangles=()) for e in plan.exchanges)
    return dataclasses.replace(plan, exchanges=exchanges)


def squares_alone(segments, rank, ranks):
    return dataclasses.replace(own_keys_alone(segments, rank, ranks), rectangles=())


def one_key_less(segments, rank, ranks):
    plan = rank_plan(segments, rank, ranks)

    def shorter(rectangles):
        return tuple(r._replace(k_start=r.k_start + 1) for r in rectangles if r.k_start + 1 < r.k_stop)

    exchanges = tuple(e._replace(rectangles=shorter(e.rectangles)) for e in plan.exchanges)
    return dataclasses.replace(plan, rectangles=shorter(plan.rectangles), exchanges=exchanges)


def shifted_documents(segments, rank, ranks):
    """Every document boundary one token late."""
    total = segments[-1].stop
    stops = [min(segment.stop + 1, total) for segment in segments]
    lengths = [b - a for a, b in zip([0, *stops], stops, strict=False)]
    return rank_plan(segments_of([length for length in lengths if length > 0]), rank, ranks)


NAMES = ["no_documents", "own_keys_alone", "squares_alone", "one_key_less", "shifted_documents"]
