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

from .errors import PublisherError, is_expired, is_retriable, redact, remember
from .settings import Settings

CHAIN_TEXT_MAX = 1000  # the chain says of each source why it had nothing, and the one that counts comes last
_REPLY = re.compile(r"(?s)\bresult: .*")  # the chain quotes replies whole, live tokens included


def connect(settings: Settings) -> Any:
    """A `feature_store_py` client, with fresh credentials from the default chain and the FeatureDB login variables.

    Raises:
        PublisherError: a package is missing, no source has a credential, or the store refused it.
    """
    try:
        from alibabacloud_credentials.client import Client as CredentialClient
        from feature_store_py import FeatureStoreClient
    except ImportError as error:
        remedy = "install it"
        if error.name == "feature_store_py":
            remedy = (
                "install Alibaba's SDK or, for the fake store, call deltaproof.fakes.feature_store_py.install() first"
            )
        raise PublisherError(f"{error.name} is not installed, and is needed to reach the store: {remedy}") from error
    username, password = os.environ.get("FEATUREDB_USERNAME"), os.environ.get("FEATUREDB_PASSWORD")
    failure: PublisherError  # raised outside of the handlers: an error that quotes a secret must not hang on as context
    try:
        with _discreet():
            credential = CredentialClient().get_credential()
    except Exception as error:
        what = f"no credential in alibabacloud_credentials' default chain: {_said(f'{type(error).__name__}: {error}')}"
        failure = PublisherError(what, retriable=True)
    else:
        remember(credential.access_key_id, credential.access_key_secret, credential.security_token, password)
        remember(base64.b64encode(f"{username}:{password}".encode()).decode())
        try:
            return FeatureStoreClient(
                access_key_id=credential.access_key_id,
                access_key_secret=credential.access_key_secret,
                region=settings.region,
                endpoint=settings.endpoint,
                security_token=credential.security_token,
                featuredb_username=username,
                featuredb_password=password,
            )
        except Exception as error:
            what = f"no client could be made: {type(error).__name__}: {redact(error)}"
            failure = PublisherError(what, retriable=is_retriable(error) or is_expired(error))
    raise failure


def _said(text: str) -> str:
    """What the credential package says, without the replies it quotes."""
    return redact(_REPLY.sub("result: [redacted]", text), CHAIN_TEXT_MAX)


@contextlib.contextmanager
def _discreet() -> Iterator[None]:
    """Rewrite what the credential package logs in this thread meanwhile: it logs the errors that quote replies."""
    logger, ours = logging.getLogger("credentials"), threading.get_ident()

    def rewrite(record: logging.LogRecord) -> bool:
        if record.thread == ours:
            record.msg, record.args, record.exc_info = _said(record.getMessage()), None, None
        return True

    logger.addFilter(rewrite)
    try:
        yield
    finally:
        logger.removeFilter(rewrite)
