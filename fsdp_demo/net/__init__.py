"""Addresses and tokens of machines, options and limits of TCP, and a link as text and numbers."""
