"""SGLang servers as engines: the server's process, and a client that speaks the engine protocol to one."""
