"""Environments for agents, their tools and time limits, and the episodes that models play in them."""
