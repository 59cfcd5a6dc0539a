"""Profiles as a part of the product. What stands on NumPy and protobuf is imported when it is first needed."""

import keyfold.profiles.tables  # noqa: F401  # the schema is known even where nothing of it is used
from keyfold.core.part import Part, later
from keyfold.profiles.settings import ProfilesSettings

PART = Part(
    name="profiles",
    summary="decaying counters about a person, owned data held back",
    settings=ProfilesSettings,
    topics=later("keyfold.profiles.service.product:topics"),
    routes=later("keyfold.profiles.routes:routes"),
    consumers=later("keyfold.profiles.worker:consumers"),
    loops=later("keyfold.profiles.worker:loops"),
    commands="keyfold.profiles.commands:app",
)
