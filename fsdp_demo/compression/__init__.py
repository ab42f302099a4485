"""Tensors to bytes and back: blocks, transform, selection, number formats. Pure mathematics, no
communication.

May import `config`.
"""
