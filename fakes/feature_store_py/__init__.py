"""The feature_store_py interface on top of the fake store, over HTTP or in process."""
