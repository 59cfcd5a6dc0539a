"""Listings for benchmarks: offers of 2 KB under ids that a peer can compute, filled directly; `pgbench`; FastAPI."""

import http.client
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench import stores
from bench.serving import LoadFailed, prepared
from keyfold.core.context import Context
from keyfold.core.settings import load
from keyfold.core.store.batch import Columns
from keyfold.listings.model import SHARDS, Ages, Offer, Price, due_at_us, shard_of
from keyfold.listings.part import PART
from keyfold.listings.service.listings import DAY_US, Listings
from keyfold.listings.service.walking import SCRUB
from keyfold.listings.settings import ListingsSettings
from tests.servers.postgres import WHEEL_VERSION, find_binaries
from tests.servers.process import ServerProcess, free_port

OFFER_BYTES = 2_048
SELLER_FIRST = 1_000_000  # sellers are numbers, so that pgbench can compute them
SELLERS = 1_000
LARGE = str(SELLER_FIRST - 1)  # the seller of very many offers
# Offers are scattered over the key space. Odd and no multiple of five, so that numbers map to ids one to one; ten
# million times it is a number of 63 bits, which is what pgbench can compute with.
SCATTER, IDS = 618_033_988_749, 10**16
PRESETS_OF_ACTIVE = (1, 2)  # `all` and `active`, of the presets that there are by default
AGES = Ages(ListingsSettings().expire_days * DAY_US, ListingsSettings().archive_days * DAY_US)
CREATED_US = time.time_ns() // 1_000 - DAY_US
FILL_OFFERS = 20_000
CLIENTS = 96
FEW_CLIENTS = 16  # with which pgbench is fastest on two cores; measured: 2 to 4 times as fast as with 96

TEXT = """
well kept one owner garage full service history new tyres timing belt done winter wheels included no rust heated seats
tow bar cruise control roof rack bluetooth radio smoke free papers ready inspection until spring small scratch rear door
battery replaced brakes renewed runs quiet sold because of moving viewing after work
"""
WORDS = TEXT.split()


def offer_id_at(number: int) -> str:
    return f"{number * SCATTER % IDS:016d}"


def seller_at(number: int) -> str:
    """Evenly over the sellers."""
    return str(SELLER_FIRST + number % SELLERS)


def half_large(number: int) -> str:
    """Half of all offers are of one seller."""
    return LARGE if number % 2 else seller_at(number // 2)


def content_of(number: int = 0) -> dict[str, Any]:
    """The content of an offer, so long that the stored offer has 2 KB."""
    chosen = (WORDS[(number * 7 + step * step * 31 + step * 17) % len(WORDS)] for step in range(1_000))
    content = {
        "make": "Volvo",
        "model": "V70 2.4 Momentum",
        "year": 2009,
        "mileage_km": 212_000,
        "condition": "used",
        "title": "Volvo V70, family car in good condition",
        "engine": {"fuel": "petrol", "power_kw": 125, "volume_cm3": 2_435},
        "equipment": ["air conditioning", "heated seats", "tow bar", "roof rack", "cruise control"],
        "description": "",
    }
    room = OFFER_BYTES - len(msgspec.json.encode(offer_at(0, seller_at(0), content)))
    return {**content, "description": " ".join(chosen)[:room]}


def offer_at(number: int, seller_id: str, content: Mapping[str, Any]) -> Offer:
    return Offer(
        offer_id=offer_id_at(number),
        seller_id=seller_id,
        category="cars",
        schema_version=2,
        price=Price(4_900_00, "EUR"),
        business_id=int(seller_id),
        shop_id=int(seller_id),
        created_at_us=CREATED_US + number,
        status_at_us=CREATED_US + number,
        updated_at_us=CREATED_US + number,
        content=content,
    )


# Stores --------------------------------------------------------------------------------------------------------------


@contextmanager
def listings_at(url: str) -> Iterator[tuple[Context, Listings]]:
    """The product with listings on the store at `url`, its presets in force."""
    prepared(url)
    context = Context.open(load(parts={"listings": ListingsSettings}, environ={}, options={"store.url": url}), [PART])
    try:
        yield context, Listings.opened(context)
    finally:
        context.close()


def fill(url: str, count: int, seller_of: Callable[[int], str] = seller_at) -> None:
    """Active offers with all that belongs to them, as the product writes them; presets must be in force already.

    They are written in the order of their keys, or a store that is larger than the memory would be read and written at
    random. The counts were compared today, so that the scrubber, which does that once a day, does not do it in a race.
    """
    contents = [content_of(number) for number in range(64)]
    counted: dict[str, int] = {}
    tables = {name: stores.filling(url, name) for name in ("offer", "offer_ids", "user_offer_presets")}
    numbers = _in_key_order(count, seller_of)
    for start in range(0, count, FILL_OFFERS):
        some = [
            offer_at(number, seller_of(number), contents[number % 64])
            for number in numbers[start : start + FILL_OFFERS].tolist()
        ]
        for offer in some:
            counted[offer.seller_id] = counted.get(offer.seller_id, 0) + 1
        tables["offer"].insert(_offers(some))
        some.sort(key=lambda offer: offer.offer_id)
        tables["offer_ids"].insert(
            {"offer_id": [offer.offer_id for offer in some], "seller_id": [offer.seller_id for offer in some]}
        )
        tables["user_offer_presets"].insert(_presets(some))
    for table in tables.values():
        table.close()
    _fill_counted(url, counted)


def _in_key_order(count: int, seller_of: Callable[[int], str]) -> "NDArray[np.int64]":
    numbers = np.arange(count, dtype=np.int64)
    sellers = [seller_of(number) for number in range(count)]
    places = {seller: place for place, seller in enumerate(sorted(set(sellers)))}
    return np.lexsort((numbers * SCATTER % IDS, np.array([places[seller] for seller in sellers], np.int64)))


def _offers(some: Sequence[Offer]) -> Columns:
    encode = msgspec.json.Encoder().encode
    return {
        "seller_id": [offer.seller_id for offer in some],
        "offer_id": [offer.offer_id for offer in some],
        "kind": ["offer"] * len(some),
        "version": [1] * len(some),
        "shown": ["active"] * len(some),
        "shard_id": [shard_of(offer.seller_id) for offer in some],
        "due_at_us": [due_at_us(offer, AGES) for offer in some],
        "body": [encode(offer).decode() for offer in some],
    }


def _presets(some: Sequence[Offer]) -> Columns:
    rows = [(offer, number) for offer in some for number in PRESETS_OF_ACTIVE]
    return {
        "seller_id": [offer.seller_id for offer, _ in rows],
        "preset_id": [number for _, number in rows],
        "create_time": [offer.created_at_us for offer, _ in rows],
        "offer_id": [offer.offer_id for offer, _ in rows],
    }


def _fill_counted(url: str, counted: Mapping[str, int]) -> None:
    sellers = sorted(counted)
    offers = [counted[seller] for seller in sellers]
    wide = [(seller, number) for seller in sellers for number in PRESETS_OF_ACTIVE]
    rows: dict[str, Columns] = {
        "sellers": {
            "seller_id": sellers,
            "shard_id": [shard_of(seller) for seller in sellers],
            "repairs": [0] * len(sellers),
        },
        "user_offer_presets_count": {
            "seller_id": [seller for seller, _ in wide],
            "preset_id": [number for _, number in wide],
            "seq_no": [0] * len(wide),
            "offers": [counted[seller] for seller, _ in wide],
        },
        "user_total_counters": {
            "seller_id": sellers,
            "counter_id": ["Active"] * len(sellers),
            "seq_no": [0] * len(sellers),
            "counter_value": offers,
        },
        "listing_walks": {
            "walk": [SCRUB] * SHARDS,
            "shard_id": list(range(SHARDS)),
            "upto_seller": [""] * SHARDS,
            "upto_offer": [""] * SHARDS,
            "is_done": [1] * SHARDS,
            "moved_at_us": [time.time_ns() // 1_000] * SHARDS,
        },
    }
    for name, columns in rows.items():
        table = stores.filling(url, name)
        table.insert(columns)
        table.close()


# Peers ---------------------------------------------------------------------------------------------------------------


def pgbench(
    url: str,
    script: str,
    variables: Mapping[str, str | int],
    seconds: int,
    clients: int = CLIENTS,
    transactions: int = 0,
) -> float:
    """Transactions a second of a script, prepared once a connection; with `transactions`, just so many a client."""
    program = find_binaries(WHEEL_VERSION) / "pgbench"
    defined = [each for name, value in variables.items() for each in ("-D", f"{name}={value}")]
    length = ["-t", str(transactions)] if transactions else ["-T", str(seconds)]
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script)
        file.flush()
        command = [str(program), "-n", "-M", "prepared", "-c", str(clients), "-j", "1", *length, *defined]
        done = subprocess.run([*command, "-f", file.name, url], capture_output=True, text=True, check=False)
    found = re.search(r"tps = ([0-9.]+)", done.stdout)
    if done.returncode or found is None or "failed transactions: 0 " not in done.stdout:
        raise LoadFailed(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(found[1])


class FastApi(ServerProcess):
    """A peer in a process of its own: `serve_fastapi(url, port)` of a benchmark."""

    name = "fastapi"

    def __init__(self, module: str, url: str) -> None:
        super().__init__()
        self.port = free_port()
        self._module = module
        self._url = url

    def _prepare(self) -> None:
        """Nothing: the store is there."""

    def _command(self) -> list[str]:
        root = str(Path(__file__).parent.parent)
        program = (
            f"import sys; sys.path.insert(0, {root!r}); from {self._module} import serve_fastapi;"
            f" serve_fastapi({self._url!r}, {self.port})"
        )
        return [sys.executable, "-c", program]

    def _answers(self) -> bool:
        try:
            return answer(self.port, "GET", "/readyz")[0] == 200
        except OSError:
            return False


def answer(
    port: int, method: str, path: str, body: str | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Status and body of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
        said = connection.getresponse()
        return said.status, said.read()
    finally:
        connection.close()
