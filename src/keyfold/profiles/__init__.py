"""Profiles: counters of a person, a banner, a page, folded from logs, with owned data held back; read online."""

from keyfold.profiles.handlers import Event, Updates, handler

__all__ = ["Event", "Updates", "handler"]
