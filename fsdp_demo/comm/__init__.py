"""Who the peers are and how bytes reach them: the store, attempts, lines, the ranks of an island, votes, counted bytes.

May import `compression`, `config`.
"""
