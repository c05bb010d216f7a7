"""A client of the store, made with the credentials of this moment: at the start, and again when a token expired."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

from .errors import PublisherError, redact, remember, wrapped
from .settings import Settings

CHAIN_TEXT_MAX = 200
_REPLY = re.compile(r"(?s)\bresult: .*")  # the chain quotes replies whole, live tokens included


def connect(settings: Settings) -> Any:
    """A `feature_store_py` client, with fresh credentials from the default chain and the FeatureDB login variables.

    Raises:
        PublisherError: a package is missing, no source has a credential, a variable is not set, or the store refused.
    """
    try:
        from alibabacloud_credentials.client import Client as CredentialClient
        from feature_store_py import FeatureStoreClient
    except ImportError as error:
        remedy = "install Alibaba's SDK or, for the fake store, call deltaproof.fakes.feature_store_py.install() first"
        if error.name != "feature_store_py":
            remedy = "install it"
        raise PublisherError(f"{error.name} is not installed, and is needed to reach the store: {remedy}") from error
    made = _make(CredentialClient, FeatureStoreClient, settings)
    if isinstance(made, PublisherError):  # raised from here: no secret stands in a frame or context of it
        raise made
    return made


def _make(credential_client: Any, store_client: Any, settings: Settings) -> Any:
    """A client, or the PublisherError that says why there is none."""
    username, password = os.environ.get("FEATUREDB_USERNAME"), os.environ.get("FEATUREDB_PASSWORD")
    if not username or not password:
        return PublisherError("no FeatureDB login: set FEATUREDB_USERNAME and FEATUREDB_PASSWORD")
    try:
        with _discreet():
            credential = credential_client().get_credential()
    except Exception as error:
        return PublisherError(f"no credential in the default chain: {_said(error)}", retriable=True)
    login = base64.b64encode(f"{username}:{password}".encode()).decode()
    remember(credential.access_key_id, credential.access_key_secret, credential.security_token, password, login)
    try:
        return store_client(
            access_key_id=credential.access_key_id,
            access_key_secret=credential.access_key_secret,
            region=settings.region,
            endpoint=settings.endpoint,
            security_token=credential.security_token,
            featuredb_username=username,
            featuredb_password=password,
        )
    except Exception as error:
        return wrapped("no client could be made", error)


def _said(error: Exception) -> str:
    """What the chain says, without the replies it quotes, and of many sources the last: the endpoint comes last."""
    text = redact(_REPLY.sub("result: [redacted]", str(error)), length_max=10_000)
    return f"{type(error).__name__}: " + (text if len(text) <= CHAIN_TEXT_MAX else "…" + text[-CHAIN_TEXT_MAX:])


@contextlib.contextmanager
def _discreet() -> Iterator[None]:
    """Drop what the credential package logs in this thread meanwhile: it logs the errors that quote replies."""
    logger, ours = logging.getLogger("credentials"), threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != ours

    logger.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        logger.removeFilter(is_of_another_thread)
