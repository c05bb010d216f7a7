"""Fakes of everything outside the training job: a Feature Store, its server and its SDK."""
