"""The process engine: real ranks in real processes, with a supervisor that lets nothing hang."""
