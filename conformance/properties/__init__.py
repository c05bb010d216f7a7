"""The properties: each is one function over a history that returns violations with evidence."""
