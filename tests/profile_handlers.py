"""Handlers of the tests: an event says itself what it counts."""

from keyfold.profiles import Event, Updates, handler


@handler("redir")
@handler("visit")
@handler("order")
@handler("ads", "banner", profile_id="banner_id")
def count(event: Event, updates: Updates) -> None:
    """`updates`: a list of [counter, key, value, owner]; the last two may be left out."""
    if event.get("raise"):
        raise RuntimeError(f"a mistake in a handler: {event['raise']}")
    for counter, key, *rest in event.get("updates", []):
        value, owner, *_ = [*rest, *[1, None][len(rest) :]]
        updates.one(counter, key, value, owner)


@handler("redir", "banner", profile_id="banner_id")
def banner(event: Event, updates: Updates) -> None:
    if event.get("page"):
        updates.one("CI_BANNER_PAGE_CLICK_COUNT", event["page"])
