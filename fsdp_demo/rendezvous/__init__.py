"""How a rank finds its place: variables, attempts, who has started, connections of an island,
stop notices, the status of a run."""
