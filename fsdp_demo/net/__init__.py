"""Addresses and tokens of machines, options of TCP, and a link as text and numbers."""
