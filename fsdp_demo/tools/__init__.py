"""Tools beside a run: a planner before it, a doctor of links and machines, a report and a look
into checkpoints after it."""
