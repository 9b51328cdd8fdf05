"""Prompts in: files, chat templates, loss masks, and the data source that deals them out."""
