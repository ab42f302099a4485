"""`attach(optimizer, "auto")`: measure the link and the first steps, let the planner choose, say
why; later say if the link has become slower than planned.

The choice is made once, at the first start. An island that joins later finds it in the store, a run
that goes on in its checkpoint. All islands choose from the same numbers, in coarse steps, so the
same link gives the same choice.
"""

from .earlier_choice import remembered, tell
from .first_steps import begin, go_on, watch

__all__ = ["begin", "go_on", "remembered", "tell", "watch"]
