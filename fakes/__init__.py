"""A Feature Store that runs on a laptop: store, HTTP server, SDK facade, error table."""
