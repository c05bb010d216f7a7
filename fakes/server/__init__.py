"""The fake Feature Store over HTTP: control plane, data plane, faults and admin routes."""
