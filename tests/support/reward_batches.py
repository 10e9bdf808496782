"""Trajectories with their rows, as a run hands them to its rewards."""

from rl_bridge.data.trajectory import single_turn
from rl_bridge.rewards import with_rows


def rows(count):
    return [{"prompt": f"{i}+0=", "answer": str(i), "_where": f"problems.jsonl, row {i + 1}"} for i in range(count)]


def trajectories(*texts, data=None):
    """One a row, in order."""
    data = rows(len(texts)) if data is None else data
    given = [
        single_turn(
            [2],
            [3, 4],
            group=i,
            messages=({"role": "user", "content": data[i]["prompt"]}, {"role": "assistant", "content": text}),
        )
        for i, text in enumerate(texts)
    ]
    return with_rows(given, data)


def values(rewards, *texts, name="reward"):
    return [t.rewards[name] for t in rewards.score(trajectories(*texts))]
