"""Reports of a suite of runs: one document, and its forms for a terminal, for machines, for CI and for a browser."""
