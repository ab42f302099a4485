"""Slow, obvious reference versions, written from the papers; nothing here imports fsdp_demo."""
