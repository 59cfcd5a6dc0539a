"""Listings and the services around them, which speak through topics alone: in the store, and on Kafka."""

import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from keyfold.core.clock import ManualClock
from keyfold.core.loops import run_until_idle
from keyfold.core.workers import loops
from keyfold.listings.model import Offer, business_of
from keyfold.listings.service import saving
from keyfold.listings.service.feeds import reporting, staging, tasks
from keyfold.listings.worker import Scheduler
from keyfold.numbering.part import PART as NUMBERING
from tests.listing_services import Moderation, PhotoService
from tests.listings import CAR, Product, car, kinds, opened

URLS = ("https://photos.example.com/1.jpg", "https://photos.example.com/broken.jpg")


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.xdist_group("kafka"))])
def product(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Product]:
    options: dict[str, Any] = {}
    if request.param == "kafka":
        server = request.getfixturevalue("kafka_server")
        options = {"topics__kind": "kafka", "topics__kafka": server.bootstrap}
        for name in ("topic", "photo_requests_topic", "photo_answers_topic", "opinions_topic"):
            options[f"listings__{name}"] = f"{name}-{uuid.uuid4().hex[:8]}"
            server.create_topic(options[f"listings__{name}"], 4)
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}", **options) as each:
        yield each


def look(url: str) -> dict[str, Any]:
    return {"error": "not an image"} if "broken" in url else {"image": {"id": url[-5:]}}


def work(product: Product, *services: PhotoService) -> None:
    """Until everybody has run dry; a broker takes its time."""
    for _ in range(6):
        run_until_idle([*loops(product.context), *(service.worker.loop() for service in services)])


def offer(product: Product, offer_id: str) -> Offer:
    return product.store.read(lambda tx: saving.load_by_id(tx, [offer_id]))[offer_id].offer


@pytest.mark.spec("LST-14", "LST-15")
def test_photos_and_opinions_go_through_topics(product: Product) -> None:
    settings = product.listings.settings
    photos = PhotoService(product.context, settings.photo_requests_topic, settings.photo_answers_topic, look)
    moderation = Moderation(product.context, settings.opinions_topic)
    seller = uuid.uuid4().hex
    (saved,) = product.make(car(seller, photos=URLS))
    offer_id = saved.offer.offer_id
    moderation.say(offer_id, is_banned=True, reason="a trial")
    moderation.send("nobody", 50, {"offer_id": "0" * 16, "version": 1, "is_banned": True})
    moderation.send("broken", 51, {"offer": 1})
    work(product, photos)
    assert photos.asked == list(URLS)
    assert offer(product, offer_id).is_banned
    assert product.counters(seller) == {"Banned": 1}
    (body,) = product.rows(f"SELECT body FROM offer WHERE kind = 'photos' AND offer_id = '{offer_id}'")
    assert '"state":"ready","image":{"id":"1.jpg"}' in body[0]
    assert '"state":"failed","error":"not an image"' in body[0]
    reasons = [reason for (reason,) in product.rows("SELECT reason FROM dead_letters ORDER BY reason")]
    assert len(reasons) == 2
    assert reasons[1] == "there is no offer 0000000000000000"
    moderation.say(offer_id, is_banned=False)
    product.change(offer_id, photos=URLS[:1])
    work(product, photos)
    assert product.counters(seller) == {"Active": 1}
    assert photos.asked == list(URLS)  # nothing is asked for twice
    told = [each for each in product.told(settings.topic) if each[0] == offer_id]
    for kind in ("offer", "photos", "moderation"):
        versions = [version for _, _, version, _ in kinds(told, kind)]
        assert versions == sorted(set(versions))
        assert versions


@pytest.mark.parametrize("store_url", ["sqlite", "postgresql-18"], indirect=True)
@pytest.mark.spec("LST-12", "LST-14")
def test_a_photo_that_cannot_be_had_is_told_in_the_report_of_its_feed(store_url: str) -> None:
    """From the item of a feed to the photo service and back, by topics alone."""
    item = {"external_id": "A1", "category": "cars", "content": CAR, "photos": URLS}
    with opened(store_url) as product:
        settings = product.listings.settings
        photos = PhotoService(product.context, settings.photo_requests_topic, settings.photo_answers_topic, look)
        staging.take_lines(product.store, product.listings, "7", 1, 0, [msgspec.json.encode(item)])
        product.do(tasks.end_task, "7", 1, 1)
        run_until_idle([*loops(product.context), photos.worker.loop()])
        assert photos.asked == list(URLS)
        report = product.store.read(lambda tx: reporting.report(tx, product.listings, "7", 1))
        assert report.feed.stage == "done"
        told = [(each.external_id, each.reason) for each in report.problems]
        assert told == [("A1", f"the photo {URLS[1]}: not an image")]
        assert product.counters("7") == {"Active": 1}  # it is active all the same


@pytest.mark.spec("LST-06", "LST-11")
def test_schedulers_share_the_work_and_survive_each_other(tmp_path: Any) -> None:
    """One dies with its shards; the other goes on where its lease ends."""
    clock = ManualClock(1_800_000_000_000_000)
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    with opened(url, clock=clock, leases__lease_seconds=1) as product:
        product.make(*[car(str(seller)) for seller in range(60)])
        product.pass_days(61)
        dying = Scheduler(product.context, product.listings, "dying")
        other = Scheduler(product.context, product.listings, "other")
        dying.step()
        other.step()
        expired = len(product.rows("SELECT 1 FROM offer WHERE shown = 'expired'"))
        assert expired == 60  # each did what it held
        product.pass_days(31)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            clock.advance(2)
            other.step()
            if len(product.rows("SELECT 1 FROM offer WHERE shown = 'archived'")) == 60:
                break
            time.sleep(0.2)
        assert len(product.rows("SELECT 1 FROM offer WHERE shown = 'archived'")) == 60
        other.stop()


@pytest.mark.spec("LST-11", "NUM-01")
def test_what_is_exported_is_what_numbering_takes(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    with opened(url, parts=[NUMBERING], numbering__offers_topic="offers") as product:
        live, banned, gone = product.make(car("7"), car("8"), car("dealer:9", warehouse_id=3))
        product.change(banned.offer.offer_id, is_banned=True)
        product.change(gone.offer.offer_id, status="removed")
        work(product)
        rows = product.rows(
            "SELECT offer_id, business_id, shop_id, warehouse_id, is_live FROM numbering_offers ORDER BY warehouse_id"
        )
        number = business_of("dealer:9")
        assert set(rows) == {
            (live.offer.offer_id, 7, 7, 0, 1),
            (banned.offer.offer_id, 8, 8, 0, 0),
            (gone.offer.offer_id, number, number, 3, 0),
        }
