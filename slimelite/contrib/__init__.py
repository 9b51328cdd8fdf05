"""Adapters to other projects' packages, each loaded when it is asked for."""
