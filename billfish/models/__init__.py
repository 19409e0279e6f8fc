"""Modules and files. Imports formats and schemes."""
