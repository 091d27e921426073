"""Access of the ``datasets`` library to the Hub, without its retries where there is no network."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

PATIENCE = 10.0  # seconds for one connection, as in the client of the Hub
_PORTS = {"http": 80, "https": 443}


def find_obstacle() -> str | None:
    """Return why the Hub cannot be asked and what to do, None if it takes a connection.

    Behind a proxy it is asked without a trial: such a machine may know no address of its own.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set. Unset it"
    if getproxies().keys() & {"http", "https", "all"}:
        return None
    address = urlsplit(constants.ENDPOINT)
    port = address.port or _PORTS.get(address.scheme, 443)
    try:
        with socket.create_connection((address.hostname or "", port), PATIENCE):
            return None
    except OSError as error:
        said = f"{constants.ENDPOINT} cannot be reached ({error.strerror or error})"
        return f"{said}. Connect to the network"


@contextmanager
def cache_only(datasets: Any) -> Iterator[None]:
    """Let the library look into its cache alone.

    Without it, each of its functions asks the Hub again and again, for 23 seconds.

    Args:
        datasets: The library.
    """
    from huggingface_hub import constants

    places = [constants, datasets.config]
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value
