"""What ``deltaproof init-target`` writes: each file here works as it is, and says what to replace."""
