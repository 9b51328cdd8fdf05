"""Reads prompts: files, chat templates, loss masks, and the data source that hands out groups of samples."""
