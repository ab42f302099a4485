"""Configurations of methods: channels, presets, rules, parsing. Nothing here touches a tensor.

Imports nothing of the package but `errors`.
"""
