"""Routers: records of one topic passed on to another, as copies that no WAL holds."""
