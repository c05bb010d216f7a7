"""What ``deltaproof init-target`` writes: each file here works as it is, and says what to replace.

Imports are relative here, as everywhere in the package, and absolute in what is written.
"""
