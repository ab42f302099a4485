"""Who the peers are and how bytes reach them: the store, attempts, peer groups, the ranks of an
island, votes, counted bytes.

May import `compression`, `config`.
"""
