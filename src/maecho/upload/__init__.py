"""Uploads from clients and merged models from the server: their file format, checks, size and inspection."""
