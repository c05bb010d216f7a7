"""A compact, correct publisher for TorchRec models: what to copy and what to compare with."""
