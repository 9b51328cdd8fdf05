"""SGLang servers as engines: the server's process, and a client that implements the engine protocol."""
