"""The limit that the authors of DropCompute (arXiv 2306.10598) choose from recorded times, in
loops. Source of the rule: github.com/paper-submissions/dropcompute at d26cc08,
`deepspeed-bert/run_pretraining.py`.
"""

from __future__ import annotations

import numpy as np


def limits(times: np.ndarray, last: bool) -> np.ndarray:
    """The 200 limits that are tried, for times [islands, steps, micro-batches] in seconds; where
    the last micro-batch is always taken, from the earliest that can leave one out."""
    ends = times.cumsum(axis=2)
    first = min(5, times.shape[2] - (3 if last else 1))
    return np.linspace(ends[:, :, first:].min(), ends.max(), 200)


def gain(times: np.ndarray, wall: float, limit: float, last: bool) -> tuple[float, float]:
    """The share of micro-batches that a limit drops, and by how much more of them a second takes;
    both as means over the steps. wall: mean seconds of a step."""
    islands, steps, micro = times.shape
    longest = [max(times[i, s].sum() for i in range(islands)) for s in range(steps)]
    overhead = wall - sum(longest) / steps
    shares, gains = [], []
    for s in range(steps):
        dropped, latest = 0, 0.0
        for i in range(islands):
            now, up = 0.0, False
            for m in range(micro):
                if last:
                    up = up or (m > 0 and now >= limit)
                    drops = up and m < micro - 1
                else:
                    drops = now + times[i, s, m] >= limit
                    up = up or drops
                if drops or (up and not last):
                    dropped += 1
                else:
                    now += times[i, s, m]
            latest = max(latest, now)
        share = dropped / (islands * micro)
        saved = (longest[s] - latest) / (longest[s] + overhead)
        shares.append(share)
        gains.append((1 - share) / (1 - saved) - 1)
    return sum(shares) / steps, sum(gains) / steps


def best(times: np.ndarray, wall: float, last: bool = True) -> tuple[float, float, float]:
    """The limit with the largest gain, its share of dropped micro-batches, and its gain."""
    tried = [(limit, *gain(times, wall, limit, last)) for limit in limits(times, last)]
    return max(tried, key=lambda each: each[2])
