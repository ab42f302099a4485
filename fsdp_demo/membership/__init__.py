"""Who counts, and how rounds are settled when an island is lost or joins: a
protocol without sockets, clock or threads."""
