"""The teacher: its context and prompt, the schedule of its weights, its scores."""
