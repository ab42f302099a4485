"""Tools beside a run: a planner before it, a doctor of links and machines, a report
after it."""
