"""Adapters to packages of other projects. Each adapter is loaded only when it is used."""
