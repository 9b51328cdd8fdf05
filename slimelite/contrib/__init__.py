"""Adapters to packages of other projects. Each is loaded only when it is used."""
