"""The deterministic engine: ranks and their threads as greenlets, in virtual time, replayed byte for byte."""
