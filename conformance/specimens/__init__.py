"""Known bugs, each a small mutation of the reference that a named property must catch."""
