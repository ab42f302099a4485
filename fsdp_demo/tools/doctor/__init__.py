"""The examination of islands before a run: links, clocks, disks and versions are measured, and each
fault is named with its cure.
"""
