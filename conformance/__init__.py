"""The properties, the known bugs they must catch, and the reports."""
