"""What stands between the islands: links, clocks, disks and versions are measured, and what is
wrong is named with its cure.
"""
