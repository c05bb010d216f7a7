"""The reference publisher: compact, readable, correct; what to copy and what to compare with. Start at publisher.py."""
