"""An SGLang server of our own and its client: torch-free, the server runs in an environment of its own."""
