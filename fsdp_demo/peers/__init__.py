"""Bytes between ranks: connections and the thread that moves them, headers, the reduce, votes,
digests, counted bytes."""
