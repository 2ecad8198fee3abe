"""Teacher context, prompt and schedule."""
