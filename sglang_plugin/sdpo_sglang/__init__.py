"""SGLang server package of sdpo-matrix; it runs in the server's environment and imports nothing of the project."""
