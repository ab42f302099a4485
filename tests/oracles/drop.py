"""The limit that the authors of DropCompute (arXiv 2306.10598) choose from recorded times, in
loops. Source of the rule: github.com/paper-submissions/dropcompute at d26cc08,
`deepspeed-bert/run_pretraining.py`.
"""

from __future__ import annotations

import numpy as np


def limits(times: np.ndarray) -> np.ndarray:
    """The 200 limits that are tried, for times [islands, steps, micro-batches] in seconds."""
    ends = times.cumsum(axis=2)
    return np.linspace(ends[:, :, 5:].min(), ends.max(), 200)


def gain(times: np.ndarray, wall: float, limit: float) -> tuple[float, float]:
    """The share of micro-batches that a limit drops, and by how much more of them a second takes;
    both as means over the steps. wall: mean seconds of a step."""
    islands, steps, micro = times.shape
    longest = [max(times[i, s].sum() for i in range(islands)) for s in range(steps)]
    overhead = wall - sum(longest) / steps
    shares, gains = [], []
    for s in range(steps):
        dropped, last = 0, 0.0
        for i in range(islands):
            end = 0.0
            for m in range(micro):
                end += times[i, s, m]
                if end < limit:
                    last = max(last, end)
                else:
                    dropped += 1
        share = dropped / (islands * micro)
        saved = (longest[s] - last) / (longest[s] + overhead)
        shares.append(share)
        gains.append((1 - share) / (1 - saved) - 1)
    return sum(shares) / steps, sum(gains) / steps


def best(times: np.ndarray, wall: float) -> tuple[float, float, float]:
    """The limit with the largest gain, its share of dropped micro-batches, and its gain."""
    tried = [(limit, *gain(times, wall, limit)) for limit in limits(times)]
    return max(tried, key=lambda each: each[2])
